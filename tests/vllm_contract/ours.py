# SPDX-License-Identifier: Apache-2.0
"""Our own sources: which file defines a name, and what each file uses of vLLM."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2] / "vllm_rocketkv"
SOURCES = sorted(ROOT.rglob("*.py"))


@cache
def tree(path: Path) -> ast.Module:
    """Parsed once."""
    return ast.parse(path.read_text())


def relative(path: Path) -> str:
    """As messages name it."""
    return f"{ROOT.name}/{path.relative_to(ROOT)}"


@cache
def _index() -> dict[str, list[str]]:
    """Files that define each name, methods as ``Class.method``."""
    found: dict[str, list[str]] = {}
    for path in SOURCES:
        for name in _names(tree(path).body):
            found.setdefault(name, []).append(relative(path))
    return found


def _names(body: list[ast.stmt], prefix: str = "") -> Iterator[str]:
    for node in body:
        match node:
            case ast.FunctionDef(name=name):
                yield prefix + name
            case ast.ClassDef(name=name):
                yield prefix + name
                yield from _names(node.body, f"{prefix}{name}.")
            case ast.Assign():
                yield from (prefix + target.id for target in node.targets if isinstance(target, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield prefix + name


def is_known(by: str) -> bool:
    """Whether the name before the colon is one of ours."""
    return by.partition(":")[0] in _index()


def where(by: str) -> str:
    """The files that define the name before the colon."""
    return " and ".join(_index().get(by.partition(":")[0], [ROOT.name]))


def imports(path: Path) -> dict[str, str]:
    """Target of each name that a file imports from vLLM, ``module:Name``, or ``module:`` for a module."""
    found = {}
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            module = (node.module or "").removeprefix("vllm").removeprefix(".")
            for alias in node.names:
                found[alias.asname or alias.name] = f"{module}:{alias.name}" if module else f"{alias.name}:"
    return found


def wrapped_methods() -> set[str]:
    """Names given to ``compat.wrapping.wrap``."""
    names = set()
    for path in (ROOT / "compat").glob("*.py"):
        for node in ast.walk(tree(path)):
            match node:
                case ast.Call(func=ast.Name(id="wrap"), args=[_, ast.Constant(value=str(name)), *_]):
                    names.add(name)
    return names


def overriding_classes() -> Iterator[tuple[str, set[str]]]:
    """Each class of vLLM's that ours derive from, with the methods of ours and of our own classes before it."""
    classes = {node.name: node for path in SOURCES for node in ast.walk(tree(path)) if isinstance(node, ast.ClassDef)}
    for path in SOURCES:
        known = imports(path)
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ClassDef):
                bases = [base for expression in node.bases if (base := _plain_name(expression))]
                methods = set(_methods(node)).union(*(_methods(classes[base]) for base in bases if base in classes))
                yield from ((known[base], methods) for base in bases if base in known)


def _plain_name(base: ast.expr) -> str:
    base = base.value if isinstance(base, ast.Subscript) else base  # Base[T]
    return base.id if isinstance(base, ast.Name) else ""


def _methods(node: ast.ClassDef) -> list[str]:
    return [statement.name for statement in node.body if isinstance(statement, ast.FunctionDef)]


CONFIG = "config:VllmConfig"
COMMON = "v1.attention.backend:CommonAttentionMetadata"
_NAMES: dict[str, dict[str, str]] = {
    "": {
        "vllm_config": CONFIG,
        "_vllm_config": CONFIG,
        "model_config": "config:ModelConfig",
        "cache_config": "config:CacheConfig",
        "scheduler_config": "config:SchedulerConfig",
        "compilation_config": "config:CompilationConfig",
        "common": COMMON,
        "common_attn_metadata": COMMON,
        "capability": "platforms.interface:DeviceCapability",
        "AttentionCGSupport": "v1.attention.backend:AttentionCGSupport",
        "AttentionType": "v1.attention.backend:AttentionType",
        "KVCacheLayout": "v1.kv_cache_interface:KVCacheLayout",
        "KVCacheSpecRegistry": "v1.kv_cache_spec_registry:KVCacheSpecRegistry",
        "AttentionBackendEnum": "v1.attention.backends.registry:AttentionBackendEnum",
        "current_platform": "platforms.interface:Platform",
        "layer": "v1.attention.backend:AttentionLayer",
        "limits": "config:SchedulerConfig",
    },
    "compat/": {
        "attention": "config:AttentionConfig",
        "attn_selector_config": "v1.attention.selector:AttentionSelectorConfig",
        "coordinator": "v1.core.kv_cache_coordinator:KVCacheCoordinator",
        "new_request": "v1.core.sched.output:NewRequestData",
        "params": "sampling_params:SamplingParams",
        "request": "v1.request:Request",
        "scheduler_output": "v1.core.sched.output:SchedulerOutput",
        "scheduler_stats": "v1.metrics.stats:SchedulerStats",
        "stats": "v1.metrics.stats:SchedulerStats",
        "state": "v1.worker.gpu.model_runner:BatchReqState",
    },
    "support.py": {
        "model": "config:ModelConfig",
        "cache": "config:CacheConfig",
        "parallel": "config:ParallelConfig",
        "speculative": "config:SpeculativeConfig",
    },
}
"""Names that our files give to objects of vLLM's: ``""`` for all of them, ``folder/`` for those in a folder."""

_UNDECLARED = {"_asdict", "_replace", "isa", "__members__"}
"""Methods of named tuples and enums, and what vLLM sets on an object whose class does not declare it."""


def attributes(path: Path) -> Iterator[tuple[str, str]]:
    """Class and name of each attribute that a file reads of an object of vLLM's."""
    known = _NAMES[""] | _NAMES.get(f"{path.parent.name}/", {}) | _NAMES.get(str(path.relative_to(ROOT)), {})
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Attribute) and node.attr not in _UNDECLARED:
            receiver = getattr(node.value, "id", getattr(node.value, "attr", ""))
            if receiver in known:
                yield known[receiver], node.attr
