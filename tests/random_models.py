# SPDX-License-Identifier: Apache-2.0
"""Random models of two small layers, for tests that need an engine and no sense."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SMALL: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}


def save_llama(path: Path, **changes: Any) -> str:
    """A Llama at ``path``; returns the path as vLLM wants it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return _save(LlamaForCausalLM, LlamaConfig(**(SMALL | changes)), path)


def save_mistral(path: Path, **changes: Any) -> str:
    """A Mistral, which may have a sliding window."""
    from transformers import MistralConfig, MistralForCausalLM

    return _save(MistralForCausalLM, MistralConfig(**(SMALL | changes)), path)


def _save(model_class: Any, config: Any, path: Path) -> str:
    import torch

    torch.manual_seed(0)
    model_class(config).save_pretrained(path)
    return str(path)
