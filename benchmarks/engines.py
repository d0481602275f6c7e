# SPDX-License-Identifier: Apache-2.0
"""Engines in processes of their own, so that two stay alive and are measured in turn.

Scheduler, worker and kernels all run in one thread of the child (`VLLM_ENABLE_V1_MULTIPROCESSING=0`), so a step is timed without
messages between processes. vLLM's CPU platform keeps the executor "uni" only then; with it nothing reads
VLLM_CPU_OMP_THREADS_BIND, which vLLM's multi-process executor does, so `child_environment` sets what that one would have set:
libgomp preloaded, one pinned OpenMP thread for each core. An idle child waits in a read of its pipe and its OpenMP threads sleep.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.machine import ROOT, cores, memory_available, variables

CACHE = ROOT / ".cache"
LOGS = CACHE / "benchmarks"
DROPPED_VARIABLES = ("VLLM_CPU_KVCACHE_SPACE",)  # it would win over the pool's size given to the engine
TOKEN_IDS = (1000, 40000)
STRETCHED_POSITIONS = 40960

# More tokens than the timed steps need: requests that are computed first decode while others still prefill.
DECODE_MARGIN = 64


@dataclass(frozen=True)
class EngineSettings:
    """One engine: plain vLLM, or rocketkv if it has options."""

    name: str
    model: str
    max_model_len: int
    pool_bytes: int
    eager: bool
    rocketkv: dict[str, Any] | None = None
    max_num_batched_tokens: int | None = None

    def arguments(self) -> dict[str, Any]:
        """The arguments of `vllm.LLM`."""
        arguments: dict[str, Any] = {
            "model": self.model,
            "max_model_len": self.max_model_len,
            "kv_cache_memory_bytes": self.pool_bytes,
            "enforce_eager": self.eager,
            "enable_prefix_caching": True,
            "use_tqdm_on_load": False,
            "seed": 0,
        }
        if self.max_num_batched_tokens:
            arguments["max_num_batched_tokens"] = self.max_num_batched_tokens
        if self.max_model_len > model_config(self.model)["max_position_embeddings"]:
            arguments["hf_overrides"] = {"max_position_embeddings": max(STRETCHED_POSITIONS, self.max_model_len)}
        if self.rocketkv is not None:
            arguments |= {"attention_backend": "rocketkv", "additional_config": {"rocketkv": self.rocketkv}}
        return arguments


@dataclass(frozen=True)
class Prompt:
    """Random token ids; prompts of one seed are prefixes of each other, so a longer one continues what is cached."""

    seed: int
    length: int

    def token_ids(self) -> list[int]:
        """The prompt itself."""
        generator = random.Random(self.seed)
        return [generator.randrange(*TOKEN_IDS) for _ in range(self.length)]


@dataclass(frozen=True)
class Step:
    """One step of the engine."""

    seconds: float
    requests: int
    tokens: int
    prefill: bool  # whether any request computed more than one token, or was new


@dataclass
class Run:
    """What happened to a set of prompts given at once."""

    seconds: float = 0.0
    steps: list[Step] = field(default_factory=list)
    first_token_seconds: list[float] = field(default_factory=list)
    cached_tokens: list[int] = field(default_factory=list)
    output_tokens: int = 0
    preemptions: int = 0

    def full_decode_steps(self, requests: int) -> list[Step]:
        """The steps in which all requests decoded and none had prompt tokens left, less the first of them."""
        return [step for step in self.steps if not step.prefill and step.requests == requests][1:]


class Engine:
    """The parent's end of an engine in a process of its own."""

    def __init__(self, settings: EngineSettings) -> None:
        need = settings.pool_bytes + (3 << 29)
        if need > memory_available():
            raise MemoryError(
                f"{settings.name} needs {need >> 20} MiB (its pool is touched at start), {memory_available() >> 20} MiB are free"
            )
        self.settings = settings
        LOGS.mkdir(parents=True, exist_ok=True)
        self.log = LOGS / f"{settings.name}.log"
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, settings, self.log), name=settings.name, daemon=False
        )
        started = time.perf_counter()
        with child_environment():
            self._process.start()
        theirs.close()
        self.info: dict[str, Any] = self._answer()
        self.start_seconds = time.perf_counter() - started

    def run(self, prompts: Sequence[Prompt], max_tokens: int, decode_steps: int | None = None) -> Run:
        """Answer the prompts; with `decode_steps`, only until so many full decode steps could be timed."""
        self._connection.send((list(prompts), max_tokens, decode_steps))
        run: Run = self._answer()
        return run

    def cpu_seconds(self) -> float:
        """CPU time that the process has used: it must stand still while another engine is measured."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def resident_bytes(self) -> int:
        """Memory that the process holds."""
        pages = Path(f"/proc/{self._process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def close(self) -> None:
        """Stop the process."""
        with contextlib.suppress(OSError):
            self._connection.send(None)
        self._process.join(30)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._connection.close()

    def _answer(self) -> Any:
        try:
            good, content = self._connection.recv()
        except EOFError:
            good, content = False, f"the process ended; see {self.log}"
        if not good:
            self.close()
            raise RuntimeError(f"engine {self.settings.name}: {content}")
        return content


@contextlib.contextmanager
def running(settings: EngineSettings) -> Iterator[Engine]:
    """An engine that is stopped in the end, whatever happens."""
    say(f"starting {settings.name} ({'eager' if settings.eager else 'compiled'}, pool {settings.pool_bytes >> 20} MiB)")
    engine = Engine(settings)
    try:
        say(
            f"{settings.name}: {engine.info['backend']}, {engine.info['num_blocks']} blocks of {engine.info['block_size']}, "
            f"{engine.resident_bytes() >> 20} MiB resident, started in {engine.start_seconds:.0f} s"
        )
        yield engine
    finally:
        engine.close()


@contextlib.contextmanager
def child_environment() -> Iterator[None]:
    """The environment of a process that computes: what vLLM's multi-process CPU executor gives its worker.

    It must stand before the process starts: libgomp reads it when it is loaded.
    """
    before = dict(os.environ)
    cpus = sorted(os.sched_getaffinity(0))
    defaults = {
        "HF_HOME": str(CACHE / "huggingface"),
        "VLLM_CACHE_ROOT": str(CACHE / "vllm"),
        "VLLM_CONFIG_ROOT": str(CACHE / "vllm-config"),
        "TORCHINDUCTOR_CACHE_DIR": str(CACHE / "torchinductor"),
        "TRITON_CACHE_DIR": str(CACHE / "triton"),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(len(cpus)),
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{cores() - 1}",  # read only if somebody asks for another executor
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    threads = int(os.environ["OMP_NUM_THREADS"])
    os.environ.setdefault("GOMP_CPU_AFFINITY", " ".join(str(cpu) for cpu in cpus[:threads]))
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    libraries = [*os.environ.get("LD_PRELOAD", "").split(":"), *_preloaded_libraries()]
    os.environ["LD_PRELOAD"] = ":".join(dict.fromkeys(library for library in libraries if library))
    for name in DROPPED_VARIABLES:
        os.environ.pop(name, None)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _preloaded_libraries() -> list[str]:
    """torch's OpenMP (unless another is preloaded), and tcmalloc if vLLM brings it: as vLLM's CpuPlatform does."""
    torch, vllm = (Path(find_spec(name).origin).parent for name in ("torch", "vllm"))  # type: ignore[union-attr, arg-type]
    found: list[Path] = sorted((vllm / "libs").glob("libtcmalloc*.so*"))[:1]
    if not any(name in os.environ.get("LD_PRELOAD", "") for name in ("libomp", "libgomp", "libiomp")):
        found += [
            *sorted((torch.parent / "torch.libs").glob("libgomp*.so*")),
            *sorted((torch / "lib").glob("libgomp*.so*")),
        ][:1]
    return [str(path) for path in found]


def model_config(model: str) -> dict[str, Any]:
    """The `config.json` of a model in a local folder."""
    import json

    content: dict[str, Any] = json.loads((Path(model) / "config.json").read_text())
    return content


def kv_bytes_per_token(model: str) -> int:
    """Bytes of K and V of one token in all layers, in 16 bits."""
    config = model_config(model)
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim * 2 * 2)


# For estimates only: SmolLM2-135M on two cores of a Zen 4 EPYC.
def start_estimate(eager: bool) -> float:
    return 40.0 if eager else 95.0


def prefill_estimate(tokens: int, cached: int = 0) -> float:
    return 0.8e-3 * (tokens - cached) + 1.7e-7 * (tokens**2 - cached**2)


def step_estimate(context: int, batch: int) -> float:
    return 0.016 + 2.0e-6 * batch * context


def say(sentence: str) -> None:
    """Tell the user what happens now."""
    print(f"{time.strftime('%H:%M:%S')}  {sentence}", flush=True)


def last_line(error: Exception) -> str:
    """An error without the traceback of the child that it may hold."""
    return str(error).strip().splitlines()[-1]


# ---- the child ----


def _serve(connection: Connection, settings: EngineSettings, log: Path) -> None:
    """Main function of the child: start the engine, say what it is, then answer runs until told to stop."""
    with open(log, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        driver = _Driver(settings)
        connection.send((True, driver.info()))
        while (work := connection.recv()) is not None:
            connection.send((True, driver.run(*work)))
    except EOFError:
        pass  # the parent is gone
    except BaseException:
        connection.send((False, traceback.format_exc()))
    connection.close()


class _Driver:
    """An engine in this process, driven step by step."""

    def __init__(self, settings: EngineSettings) -> None:
        from vllm import LLM

        self.engine: Any = LLM(**settings.arguments()).llm_engine
        self.core: Any = self.engine.engine_core.engine_core
        self.scheduler: Any = self.core.scheduler
        self.scheduled: Any = None
        self._number = 0
        schedule = self.scheduler.schedule

        def remembering(*arguments: Any, **keywords: Any) -> Any:
            self.scheduled = schedule(*arguments, **keywords)
            return self.scheduled

        self.scheduler.schedule = remembering

    def info(self) -> dict[str, Any]:
        """What the engine resolved its settings to."""
        import torch

        config = self.engine.vllm_config
        kv_cache = self.scheduler.kv_cache_config
        layer = next(iter(config.compilation_config.static_forward_context.values()))
        return {
            "backend": layer.attn_backend.get_name(),
            "executor": type(self.core.model_executor).__name__,
            "threads": torch.get_num_threads(),
            "block_size": config.cache_config.block_size,
            "num_blocks": kv_cache.num_blocks,
            "block_bytes": kv_cache.kv_cache_tensors[0].size // kv_cache.num_blocks,
            "max_model_len": config.model_config.max_model_len,
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "max_num_seqs": config.scheduler_config.max_num_seqs,
            "compilation_mode": str(config.compilation_config.mode),
            "additional_config": dict(config.additional_config or {}),
            "environment": variables(os.environ),
        }

    def run(self, prompts: Sequence[Prompt], max_tokens: int, decode_steps: int | None) -> Run:
        """Give the prompts to the engine at once and step it; see `Engine.run`."""
        from vllm import SamplingParams

        # Text is not needed: turning ids into it is the same work for both engines, and not what is measured.
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        self._number += 1
        numbered = {f"{self._number}-{place}": prompt.token_ids() for place, prompt in enumerate(prompts)}
        run = Run()
        first: dict[str, float] = {}
        outputs: dict[str, Any] = {}
        started = time.perf_counter()
        for name, token_ids in numbered.items():
            self.engine.add_request(name, {"prompt_token_ids": token_ids}, params)
        requests = list(self.scheduler.requests.values())
        timed = 0
        while self.engine.has_unfinished_requests() and (decode_steps is None or timed <= decode_steps):
            before = time.perf_counter()
            finished = self.engine.step()
            after = time.perf_counter()
            step = self._step(after - before)
            run.steps.append(step)
            timed += not step.prefill and step.requests == len(numbered)
            for output in finished:
                first.setdefault(output.request_id, after - started)
                outputs[output.request_id] = output
        run.seconds = time.perf_counter() - started
        if self.engine.has_unfinished_requests():
            self.engine.abort_request(list(numbered))
        run.first_token_seconds = [first[name] for name in numbered]
        run.cached_tokens = [outputs[name].num_cached_tokens or 0 for name in numbered]
        run.output_tokens = sum(len(output.outputs[0].token_ids) for output in outputs.values())
        run.preemptions = sum(request.num_preemptions for request in requests)
        return run

    def _step(self, seconds: float) -> Step:
        counts = self.scheduled.num_scheduled_tokens
        prefill = bool(self.scheduled.scheduled_new_reqs) or any(count > 1 for count in counts.values())
        return Step(seconds, len(counts), self.scheduled.total_num_scheduled_tokens, prefill)
