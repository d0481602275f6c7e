# SPDX-License-Identifier: Apache-2.0
"""Ask a running `make serve` for a fact planted in one long document: `python examples/ask.py [--port 8000] [--tokens 7000]`."""

from __future__ import annotations

import argparse
from pathlib import Path

import openai
from transformers import AutoTokenizer

from examples.demo_document import ANSWER_TOKENS, needle_prompt


def main() -> None:
    """Send one completion request and print what was planted and what came back."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--tokens", type=int, default=7000)
    parser.add_argument("--model", default=str(Path(__file__).parent.parent / ".cache" / "demo-model"))
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    prompt, planted = needle_prompt(tokenizer, options.tokens, depth=0.5, index=3)
    client = openai.OpenAI(base_url=f"http://localhost:{options.port}/v1", api_key="none")
    reply = client.completions.create(model="demo", prompt=prompt, max_tokens=ANSWER_TOKENS, temperature=0)
    assert reply.usage is not None
    print(f"{reply.usage.prompt_tokens} prompt tokens; planted: {planted}; answered: {reply.choices[0].text.strip()}")


if __name__ == "__main__":
    main()
