# SPDX-License-Identifier: Apache-2.0
"""Every method of the comparison at equal token budgets, on planted facts: what it finds, holds, reads and how fast it is.

    python -m benchmarks.methods                                  # about an hour on two cores
    python -m benchmarks.methods --policies snapkv,rocketkv --budgets 256

A *budget* of t tokens is what one decode step may read for each KV head: what streaming_llm, h2o and snapkv keep; what quest
and hsa attend to; for rocketkv the paper's split of t between what is kept and what is attended to (``layout.adaptive_split``),
so that estimating costs about as much as attending. The table says what was really read, the estimation counted as tokens.

One engine serves several policies, chosen request by request, so that their prompts are computed once; policy h2o takes no
prefix hits, quest and hsa have a cache format of their own. Policy full, measured just before each cell in the same engine, is
what times per output token are compared with: it is vLLM's own attention. What the results file holds is not measured again.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.engines import child_environment, last_line, say
from benchmarks.methods_report import write
from benchmarks.run import names, numbers
from benchmarks.store import Results
from examples import demo_document
from vllm_rocketkv.config import RocketKVConfig
from vllm_rocketkv.layout import adaptive_split, ceil_div

SERIES = "methods"
OUTPUT_TOKENS = 24
MAX_MODEL_LEN = 8192
MAX_BUDGET = 4096
BLOCK_SIZE = 32
"""Small, so that budgets of 128 tokens are blocks and a window."""
POLICIES = ("full", "streaming_llm", "h2o", "snapkv", "quest", "hsa", "rocketkv", "rocketkv_mt")


@dataclass(frozen=True)
class Cell:
    """One policy at one budget on documents of one length, a fact at every depth."""

    policy: str
    budget: int
    length: int
    depths: tuple[float, ...]
    documents: int

    @property
    def key(self) -> str:
        return f"{self.policy} budget {self.budget} length {self.length}"

    def request_options(self) -> dict[str, Any]:
        """What the request says of itself."""
        if self.policy == "full":
            return {"rocketkv": "off"}
        options: dict[str, Any] = {"rocketkv_policy": self.policy}
        if self.policy in ("streaming_llm", "snapkv", "h2o"):
            options["rocketkv_prompt_budget"] = self.budget
        elif self.policy in ("quest", "hsa"):
            options |= {"rocketkv_prompt_budget": self.budget, "rocketkv_topk_tokens": self.budget}
        else:
            split = adaptive_split(self.length, self.budget, OUTPUT_TOKENS)
            options["rocketkv_prompt_budget"] = max(split.prompt_budget, 32 + BLOCK_SIZE)
            options["rocketkv_topk_tokens"] = split.topk_tokens
        return options


@dataclass(frozen=True)
class EnginePlan:
    """One engine and the policies that its requests may ask for."""

    name: str
    rocketkv: dict[str, Any]
    policies: tuple[str, ...]


ENGINES = (
    EnginePlan(
        "rocketkv",
        {"policy": "rocketkv", "prompt_budget": MAX_BUDGET, "topk_tokens": 1024, "page_size": 4},
        ("full", "streaming_llm", "snapkv", "rocketkv", "rocketkv_mt"),
    ),
    EnginePlan("quest", {"policy": "quest", "prompt_budget": MAX_BUDGET, "page_size": 16}, ("quest",)),
    EnginePlan("hsa", {"policy": "hsa", "prompt_budget": MAX_BUDGET, "page_size": 4}, ("hsa",)),
    EnginePlan("h2o", {"policy": "h2o", "prompt_budget": MAX_BUDGET}, ("h2o",)),
)


def tokens_read(config: RocketKVConfig, num_cached: int) -> float:
    """Tokens whose K and V one decode step reads for a KV head with ``num_cached`` of them; of a KT page the step reads one
    vector (quest: two), each counted as half a token's K and V."""
    if not config.selects or num_cached <= config.dense_below:
        return num_cached
    vectors = 2 if config.selection == "quest" else 1
    return min(config.topk_for_step, num_cached) + ceil_div(num_cached, config.page_size) * vectors / 2


# ---- the child: one engine ----


@dataclass
class _Child:
    engine: Any = None
    config: RocketKVConfig = field(default_factory=lambda: RocketKVConfig.parse(None))
    prompts: dict[Any, list[tuple[list[int], str]]] = field(default_factory=dict)


_child = _Child()


def _start(model: str, rocketkv: dict[str, Any]) -> None:
    from vllm import LLM

    _child.config = RocketKVConfig.parse(rocketkv)
    _child.engine = LLM(
        model,
        attention_backend="rocketkv",
        additional_config={"rocketkv": rocketkv},
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=MAX_MODEL_LEN,
        block_size=BLOCK_SIZE,
        kv_cache_memory_bytes=6 << 30,  # the prompts of all lengths stay in the prefix cache
        enforce_eager=True,
        seed=0,
        use_tqdm_on_load=False,
    )


def _prompts(cell: Cell) -> list[tuple[list[int], str]]:
    """The cell's documents, the same for every policy: (token ids, answer)."""
    key = (cell.length, cell.depths, cell.documents)
    if key not in _child.prompts:
        tokenizer = _child.engine.get_tokenizer()
        made = []
        for number in range(cell.documents):
            for place, depth in enumerate(cell.depths):
                index = number * len(cell.depths) + place
                text, answer = demo_document.needle_prompt(tokenizer, cell.length, depth, index)
                made.append((tokenizer.encode(text, add_special_tokens=False), answer))
        _child.prompts[key] = made
    return _child.prompts[key]


def _measure(cell: Cell) -> dict[str, Any]:
    """Answer the cell's prompts as one batch; the engine's steps are timed while all of them decode."""
    from vllm import SamplingParams

    from vllm_rocketkv.request_options import request_config

    core = _child.engine.llm_engine
    scheduler = core.engine_core.engine_core.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    extra = cell.request_options()
    params = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, extra_args=extra)
    prompts = _prompts(cell)
    for number, (token_ids, _) in enumerate(prompts):
        core.add_request(str(number), {"prompt_token_ids": token_ids}, params)
    outputs: dict[str, Any] = {}
    seconds: list[float] = []
    held: list[int] = []
    while core.has_unfinished_requests():
        before = time.perf_counter()
        finished = core.step()
        after = time.perf_counter()
        outputs |= {output.request_id: output for output in finished}
        if len(outputs) == len(prompts) and core.has_unfinished_requests():
            seconds.append(after - before)
            held.append(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())
    config = request_config(_child.config, extra) or _child.config
    longest = max(len(token_ids) for token_ids, _ in prompts)
    cached = longest + OUTPUT_TOKENS
    if config.is_sparse(longest, BLOCK_SIZE):
        cached -= config.layout(longest, BLOCK_SIZE).dropped_tokens_at(cached - 1)
    answers = [outputs[str(number)].outputs[0].text.strip() for number in range(len(prompts))]
    cache = scheduler.kv_cache_config
    block_bytes = sum(tensor.size for tensor in cache.kv_cache_tensors) / cache.num_blocks
    return {
        "policy": cell.policy,
        "budget": cell.budget,
        "length": cell.length,
        "depths": list(cell.depths),
        "found": [text.startswith(answer) for text, (_, answer) in zip(answers, prompts, strict=True)],
        "answers": answers,
        # Every prompt is compacted two steps after its last chunk, and no request has ended.
        "kv_bytes_per_request": held[3] * block_bytes / len(prompts),
        "tokens_read": tokens_read(config, cached) if config.policy != "full" else longest + OUTPUT_TOKENS,
        "seconds_per_step": statistics.median(seconds[3:]),
        "batch": len(prompts),
    }


# ---- the parent ----


def run(options: argparse.Namespace, results: Results) -> None:
    """Measure what is missing, engine by engine; a file is written after every cell."""
    depths = tuple(place / (options.depths - 1) for place in range(options.depths))
    for plan in ENGINES:
        wanted = [
            Cell(policy, budget, length, depths, options.documents)
            for length in options.lengths
            for policy in plan.policies
            for budget in (options.budgets if policy != "full" else (0,))
            if policy in options.policies
        ]
        settings = {"rocketkv": plan.rocketkv, "documents": options.documents, "depths": options.depths}
        missing = [cell for cell in wanted if not results.done(SERIES, cell.key, settings)]
        if not missing:
            continue
        say(f"==> engine {plan.name}: {len(missing)} of {len(wanted)} cells")
        with (
            child_environment(),
            ProcessPoolExecutor(
                1, multiprocessing.get_context("spawn"), _start, (options.model, plan.rocketkv)
            ) as child,
        ):
            for cell in missing:
                dense = child.submit(_measure, Cell("full", 0, cell.length, cell.depths, cell.documents)).result()
                entry = child.submit(_measure, cell).result()
                entry["dense_seconds_per_step"] = dense["seconds_per_step"]
                entry["dense_kv_bytes_per_request"] = dense["kv_bytes_per_request"]
                results.put(SERIES, cell.key, settings, entry)
                ratio = dense["seconds_per_step"] / entry["seconds_per_step"]
                say(f"{cell.key}: {sum(entry['found'])} of {len(entry['found'])} found, {ratio:.2f} x dense's speed")


def parser() -> argparse.ArgumentParser:
    """All options."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = names(POLICIES)
    made.add_argument("--policies", type=known, default=POLICIES, help="of " + ",".join(POLICIES))  # type: ignore[arg-type]
    made.add_argument("--budgets", type=numbers, default=(128, 256, 512, 1024))
    made.add_argument("--lengths", type=numbers, default=(1000, 2000, 4000, 7500))
    made.add_argument("--depths", type=int, default=5, help="facts, evenly from the first sentence to the last")
    made.add_argument("--documents", type=int, default=1, help="documents for each depth")
    made.add_argument("--output", default="methods", help="name of the files in benchmarks/results/, without an ending")
    made.add_argument("--fresh", action="store_true", help="forget what the results file holds")
    made.add_argument("--report", action="store_true", help="only write Markdown and picture from the results file")
    made.add_argument("--model", default=str(machine.ROOT / ".cache" / "demo-model"))
    return made


def main() -> None:
    """Measure, then write table and heat maps."""
    options = parser().parse_args()
    path = machine.ROOT / "benchmarks" / "results" / f"{options.output}.json"
    results = Results(path, options.fresh)
    if not options.report:
        if not (Path(options.model) / "config.json").is_file():
            sys.exit(f"{options.model} holds no model: run `make model`")
        print(machine.summary(machine.describe()))
        results.begin(sys.argv[1:])
        try:
            run(options, results)
        except (RuntimeError, MemoryError) as error:
            say(f"FAILED: {last_line(error)}")
    print(write(results))


if __name__ == "__main__":
    main()
