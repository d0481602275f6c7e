# SPDX-License-Identifier: Apache-2.0
"""``kernels.reference`` against kvpress (NVIDIA, Apache-2.0), another implementation of three of our evictions, on random layers.

==================  ===============================================================================================
ours                kvpress 0.5.5
==================  ===============================================================================================
``streaming_llm``   ``StreamingLLMPress``: the same tokens for any sinks and budget. (The paper also moves keys to new positions;
                    neither does.)
``snapkv``          ``SnapKVPress``: the same scores but for the pool, a mean over ``kernel_size`` tokens (zeros beyond the ends)
                    where ours is a maximum. Its means over window and group rank as our sums do. It forces no sinks, and knows
                    ``window_softmax`` "all" alone. So the same tokens at kernel size 1 without sinks.
``h2o``             ``ObservedAttentionPress``: the same sums of attention, but each divided by the number of queries that see the
                    token, and no share for recent tokens. So the same tokens from our sums divided likewise, with
                    ``num_recent`` 0. It sees one forward pass: sums do not go on while decoding.
evictions of        ``DecodingPress`` runs any of these again on what is left, every so many tokens, as ours. In its own hook
decoded tokens      ``SnapKVPress`` would rotate all window queries to the newest token's position, since a step of one token
                    brings one position's angles; given those of the window, as here, the tokens are the same.
==================  ===============================================================================================
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d

from tests.policy_oracle import Lengths, Life
from vllm_rocketkv.config import RocketKVConfig
from vllm_rocketkv.kernels import reference

TOKENS, HEAD_SIZE, KV_HEADS, GROUP = 300, 16, 2, 3
SCALE = HEAD_SIZE**-0.5


def press(name: str, *args: Any, **options: Any) -> Any:
    """A press of kvpress. Its package is not executed: that would ask for the packages datasets and fire, which other presses
    need, and replace attention functions of transformers in the whole process."""
    if "kvpress" not in sys.modules:
        spec = importlib.util.find_spec("kvpress")
        assert spec is not None, "kvpress is missing: make install"
        package = types.ModuleType("kvpress")
        package.__path__ = list(spec.submodule_search_locations or ())
        sys.modules["kvpress"] = package
    module = {
        "StreamingLLMPress": "streaming_llm_press",
        "SnapKVPress": "snapkv_press",
        "ObservedAttentionPress": "observed_attention_press",
        "DecodingPress": "decoding_press",
    }[name]
    return getattr(importlib.import_module(f"kvpress.presses.{module}"), name)(*args, **options)


@dataclass
class Layer:
    """What one attention layer of the model computed, in kvpress' shapes and in ours."""

    module: Any
    hidden_states: Tensor
    angles: tuple[Tensor, Tensor]
    keys: Tensor
    """``[1, Hkv, N, D]``."""
    attentions: Tensor
    """``[1, Hq, N, N]``."""
    query: Tensor
    """``[N, Hq, D]``."""

    @property
    def key(self) -> Tensor:
        """``[N, Hkv, D]``."""
        return self.keys[0].transpose(0, 1)

    def score(self, press: Any, with_attentions: bool = True) -> Tensor:
        kwargs = {"position_embeddings": self.angles}
        attentions = self.attentions if with_attentions else None
        return press.score(self.module, self.hidden_states, self.keys, self.keys, attentions, kwargs)[0]

    def kept(self, press: Any, num_kept: int, held: Tensor | None = None, length: int = TOKENS) -> Tensor:
        """Positions that ``press`` keeps of ``held`` [Hkv, n], or of all, when ``length`` tokens are computed."""
        held = torch.arange(TOKENS).expand(KV_HEADS, -1) if held is None else held
        index = held[None, ..., None].expand(-1, -1, -1, HEAD_SIZE)
        kwargs = {"position_embeddings": tuple(part[:, :length] for part in self.angles)}
        attentions = self.attentions if length == TOKENS else None
        if hasattr(press, "target_size"):
            press.target_size = num_kept
        else:
            press.compression_ratio = 1 - (num_kept + 0.5) / held.shape[1]
        hidden_states = self.hidden_states[:, :length]
        _, positions = press.compress(self.module, hidden_states, self.keys.gather(2, index), index, attentions, kwargs)
        return positions[0, :, :, 0].sort(1).values


@pytest.fixture(scope="module")
def layers() -> list[Layer]:
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=96,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=KV_HEADS * GROUP,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_SIZE,
        initializer_range=0.2,  # sharp attention
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    found: list[Layer] = []

    def note(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        hidden, angles = kwargs["hidden_states"], kwargs["position_embeddings"]
        query = module.q_proj(hidden).view(1, TOKENS, -1, HEAD_SIZE).transpose(1, 2)
        keys = kwargs["past_key_values"].layers[module.layer_idx].keys
        query, _ = apply_rotary_pos_emb(query, keys, *angles)
        found.append(Layer(module, hidden, angles, keys, output[1], query[0].transpose(0, 1)))

    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(note, with_kwargs=True)
    with torch.no_grad():
        model(torch.randint(64, (1, TOKENS)), past_key_values=DynamicCache())
    return found


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize(("sinks", "num_kept"), [(4, 5), (4, 100), (32, 33), (17, 299), (1, 150)])
def test_streaming_llm(layers: list[Layer], index: int, sinks: int, num_kept: int) -> None:
    theirs = layers[index].kept(press("StreamingLLMPress", n_sink=sinks), num_kept)
    assert torch.equal(theirs, reference.keep_sinks_and_recent(TOKENS, num_kept, sinks, KV_HEADS))


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize(("window", "num_kept"), [(1, 2), (8, 100), (32, 33), (32, 120), (64, 290)])
def test_snapkv_without_a_pool(layers: list[Layer], index: int, window: int, num_kept: int) -> None:
    layer = layers[index]
    theirs = layer.kept(press("SnapKVPress", window_size=window, kernel_size=1), num_kept)
    scores = reference.window_scores(layer.query[-window:], layer.key, SCALE, kernel_size=1)
    assert torch.equal(theirs, reference.keep_tokens(scores, num_kept, window))


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("with_attentions", [False, True])
@pytest.mark.parametrize("kernel_size", [1, 5, 63])
def test_snapkv_differs_in_the_pool_alone(
    layers: list[Layer], index: int, with_attentions: bool, kernel_size: int
) -> None:
    layer, window = layers[index], 32
    theirs = layer.score(press("SnapKVPress", window_size=window, kernel_size=kernel_size), with_attentions)
    raw = reference.window_scores(layer.query[-window:], layer.key, SCALE, kernel_size=1)
    pool = {"kernel_size": kernel_size, "stride": 1, "padding": kernel_size // 2}
    mean = avg_pool1d(raw / (window * GROUP), **pool)
    torch.testing.assert_close(theirs[:, :-window].double(), mean, rtol=1e-4, atol=1e-9)
    ours = reference.window_scores(layer.query[-window:], layer.key, SCALE, kernel_size=kernel_size)
    assert torch.equal(ours, max_pool1d(raw, **pool))


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("num_kept", [1, 50, 150, 299])
def test_h2o_differs_in_the_division_alone(layers: list[Layer], index: int, num_kept: int) -> None:
    layer, num_queries = layers[index], torch.arange(TOKENS, 0, -1)
    ours = reference.accumulated_scores(layer.query, layer.key, SCALE)
    theirs = layer.score(press("ObservedAttentionPress"))
    torch.testing.assert_close(theirs.double() * num_queries * GROUP, ours, rtol=1e-4, atol=1e-6)
    kept = layer.kept(press("ObservedAttentionPress"), num_kept)
    assert torch.equal(kept, reference.keep_heavy(ours / num_queries, num_kept, num_recent=0))


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("num_prompt", [40, 120], ids=["short", "long"])
@pytest.mark.parametrize("policy", ["streaming_llm", "snapkv"])
def test_evictions_of_decoded_tokens(layers: list[Layer], index: int, num_prompt: int, policy: str) -> None:
    """A prompt within and one beyond the budget; what one eviction has left, the next one chooses from."""
    options = {"policy": policy, "prompt_budget": 64, "decode_budget": 70, "decode_interval": 32}
    if policy == "snapkv":
        options |= {"window_size": 16, "kernel_size": 1, "sink_tokens": 0}
        base = press("SnapKVPress", window_size=16, kernel_size=1)
    else:
        options |= {"sink_tokens": 4}
        base = press("StreamingLLMPress", n_sink=4)
    layer, config = layers[index], RocketKVConfig.parse(options)
    lengths = Lengths(num_prompt, config, block_size=16)
    life = Life(lengths, KV_HEADS, SCALE, softcap=0.0)
    life.compute(layer.query, layer.key, 0, TOKENS)
    held, computed = torch.empty(KV_HEADS, 0, dtype=torch.long), 0
    milestones = lengths.milestones()
    assert len(milestones) == len([length for length, _ in life.evictions if length <= milestones[-1]]) == 4
    for length in milestones:
        held = torch.cat([held, torch.arange(computed, length).expand(KV_HEADS, -1)], 1)
        computed = length
        expected = life.left(length)
        held = layer.kept(press("DecodingPress", base), expected.shape[1], held, length)
        assert torch.equal(held, expected)
