# SPDX-License-Identifier: Apache-2.0
"""Policy ``rocketkv_mt`` in the real engine: every turn of a conversation is evicted from its whole history again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from examples import demo_document
from tests.test_engine import generate, metric

pytestmark = pytest.mark.engine

BUDGET, BLOCK_SIZE, NUM_FACTS = 512, 128, 4


def turns(tokenizer: Any, num_tokens: int) -> list[tuple[list[int], str]]:
    """A conversation about one document with several facts, one asked for in each turn: (prompt, answer) of each."""
    depths = demo_document.needle_depths(NUM_FACTS)
    facts = [demo_document.make_fact(index, depth) for index, depth in enumerate(depths)]
    document = demo_document.make_document(num_tokens, tokenizer, facts, seed=3)
    messages: list[dict[str, str]] = []
    made = []
    for fact in facts:
        question = f"Question: {fact.question} Answer with the number only."
        content = question if messages else demo_document.question_prompt(document, fact)
        messages.append({"role": "user", "content": content})
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) + fact.answer_start
        made.append((tokenizer.encode(text, add_special_tokens=False), fact.number))
        messages.append({"role": "assistant", "content": f"{fact.answer_start} {fact.number}."})
    return made


def test_each_turn_finds_what_earlier_turns_dropped(make_engine: Callable[..., Any], tokenizer: Any) -> None:
    """Turn k hits the history in the prefix cache, though it was evicted after turn k - 1, and gives the tokens of a cold cache;
    between the turns, prompts of other policies fill the pool: pinned blocks outlive them."""
    conversation = turns(tokenizer, 1500)  # longer, and the model with dense attention mixes up the facts
    others = [turns(tokenizer, 2500 + 100 * i)[0][0][64:] for i in range(4)]
    rocketkv = {"policy": "rocketkv_mt", "prompt_budget": BUDGET, "pinned_tokens": 4096}
    blocks = {"num_gpu_blocks_override": 80, "max_model_len": 4096, "block_size": BLOCK_SIZE, "dtype": "float32"}
    engine = make_engine(rocketkv, **blocks)
    cold = []
    for prompt, _ in conversation:
        assert engine.reset_prefix_cache(), "blocks were left in use"
        cold += generate(engine, [prompt], demo_document.ANSWER_TOKENS)
    assert engine.reset_prefix_cache(), "blocks were left in use"
    warm, hits = [], []
    for prompt, _ in conversation:
        before = metric(engine, "vllm:prefix_cache_hits")
        warm += generate(engine, [prompt], demo_document.ANSWER_TOKENS)
        hits.append(metric(engine, "vllm:prefix_cache_hits") - before)
        for other in others:
            generate(engine, [other], 2, extra_args={"rocketkv_policy": "rocketkv"})
    assert warm == cold
    history = [len(prompt) // BLOCK_SIZE * BLOCK_SIZE for prompt, _ in conversation[:-1]]
    assert hits[0] == 0
    assert all(hit >= length - BLOCK_SIZE for hit, length in zip(hits[1:], history, strict=True)), hits
    found = [answer in tokenizer.decode(tokens) for tokens, (_, answer) in zip(warm, conversation, strict=True)]
    assert all(found), found
    assert engine.reset_prefix_cache(), "blocks were left in use"
