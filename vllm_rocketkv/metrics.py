# SPDX-License-Identifier: Apache-2.0
"""What a user can count: filled by the block manager in the engine core, exported by the API process on ``/metrics``.

Every count follows from lengths alone (I3), so the scheduler knows it without a message from a worker.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client import Counter

_KEY_PREFIX = "rocketkv:"

_HELP = {
    "requests_evicted": "First evictions: prompts whose blocks went back to the pool (again after a preemption).",
    "prompt_tokens_kept": "Prompt tokens kept for each KV head of each layer, over evicted requests (for prompts within the "
    "budget, with the tokens decoded up to the first eviction).",
    "prompt_tokens_dropped": "Prompt tokens dropped for each KV head of each layer, over evicted requests (likewise).",
    "blocks_freed": "KV cache blocks by which evicted requests became shorter.",
    "decode_evictions": "Evictions of decoded tokens, after the first eviction of their request.",
    "decode_tokens_dropped": "Tokens dropped by these for each KV head of each layer.",
    "pages_selected": "Pages of K and V selected by decode steps, rejected drafts included, for each KV head of each layer.",
}


@dataclass
class Counts:
    """Counts since they were last taken; blocks are those of all KV cache groups."""

    requests_evicted: int = 0
    prompt_tokens_kept: int = 0
    prompt_tokens_dropped: int = 0
    blocks_freed: int = 0
    decode_evictions: int = 0
    decode_tokens_dropped: int = 0
    pages_selected: int = 0

    def __iadd__(self, other: Counts) -> Counts:
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))
        return self


def pack(counts: Counts) -> dict[str, int]:
    """Counts as entries of a ``dict[str, int]`` that others write to as well; zeros are left out."""
    return {_KEY_PREFIX + f.name: value for f in fields(counts) if (value := getattr(counts, f.name))}


def unpack(entries: dict[str, int]) -> Counts | None:
    """Take what ``pack`` put into ``entries`` out again; None when there is nothing."""
    found = {key: entries.pop(key) for key in list(entries) if key.startswith(_KEY_PREFIX)}
    return Counts(**{key.removeprefix(_KEY_PREFIX): value for key, value in found.items()}) if found else None


@cache
def _counter(name: str) -> Counter:
    from prometheus_client import Counter

    return Counter(f"rocketkv:{name}", _HELP[name], labelnames=["engine"])


def register(engine_index: int = 0) -> None:
    """Make every counter visible on ``/metrics`` as 0 before the first event."""
    for field in fields(Counts):
        _counter(field.name).labels(str(engine_index))


def export(counts: Counts, engine_index: int) -> None:
    """Add ``counts`` to the Prometheus counters of this process."""
    for field in fields(counts):
        _counter(field.name).labels(str(engine_index)).inc(getattr(counts, field.name))
