# SPDX-License-Identifier: Apache-2.0
"""The kinds of entries of the table. Each says what it expects and, where vLLM differs, one sentence about it."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tests.vllm_contract.ours import where
from tests.vllm_contract.source import Definition, Function, Moved, Package, parameters, signature

Expected = str | Mapping[str, str]
"""What all versions have, or what each has (``{"0.32": ..., "0.33": ...}``). Others are held against the newest."""


def _of_version(expected: Expected, version: str) -> str:
    if isinstance(expected, str):
        return expected
    minor = ".".join(version.split(".")[:2])
    newest = max(expected, key=lambda known: [int(part) for part in known.split(".")])
    return expected.get(minor, expected[newest])


@dataclass(frozen=True)
class Entry:
    """One thing of vLLM's that we rely on."""

    target: str
    """``module:Name`` or ``module:Class.member``."""

    by: str = dataclasses.field(kw_only=True)
    """Who needs it: ``Class.method`` or another name of ours, then ``: why`` where that does not say it."""

    def problems(self, package: Package) -> Iterator[str]:
        """A sentence for each thing that is not as expected."""
        try:
            for expected, found in self._differences(package):
                yield self._sentence(package, expected, found)
        except Moved as moved:
            yield self._sentence(package, self.expectation(package.version), str(moved))

    def expectation(self, version: str) -> str:
        """What is expected, in words."""
        return "it to exist"

    def _differences(self, package: Package) -> Iterator[tuple[str, str]]:
        package.find(self.target)
        yield from ()

    def _sentence(self, package: Package, expected: str, found: str) -> str:
        name = f"{package.root.name}.{self.target.replace(':', '.')}"
        version = package.version or "unknown"
        return (
            f"{name}: expected {expected}, found that {found} (vLLM {version}); used in {where(self.by)} by {self.by}."
        )


@dataclass(frozen=True)
class Exists(Entry):
    """We import or name it."""


@dataclass(frozen=True)
class Has(Entry):
    """We read these fields, properties or methods of its instances."""

    names: tuple[str, ...]

    def expectation(self, version: str) -> str:
        return f"the fields {', '.join(self.names)}"

    def _differences(self, package: Package) -> Iterator[tuple[str, str]]:
        package.find(self.target)
        for name in self.names:
            try:
                package.find(f"{self.target}.{name}")
            except Moved as moved:
                yield f"{self.target.rpartition(':')[2]}.{name}", str(moved)


@dataclass(frozen=True)
class Takes(Entry):
    """A function's binding and parameters. ``...`` stands for any number of parameters."""

    signature: Expected

    def expectation(self, version: str) -> str:
        return _of_version(self.signature, version)

    def _differences(self, package: Package) -> Iterator[tuple[str, str]]:
        expected = _of_version(self.signature, package.version)
        found = signature(_function(package.find(self.target)))
        if not _matches(expected, found):
            yield expected, f"it is {found}"


@dataclass(frozen=True)
class Overrides(Takes):
    """We replace this method in a subclass, so vLLM calls ours with all of these."""


@dataclass(frozen=True)
class Wraps(Takes):
    """We wrap this method in place and name these parameters; all others are passed on."""


@dataclass(frozen=True)
class Calls(Entry):
    """We call it like this: ``(first, second, option=...)``, positional arguments by the names of vLLM's parameters."""

    call: str

    def expectation(self, version: str) -> str:
        return f"it to take the call {self.call}"

    def _differences(self, package: Package) -> Iterator[tuple[str, str]]:
        call = ast.parse(f"f{self.call}", mode="eval").body
        assert isinstance(call, ast.Call)
        problem = _misfit(call, parameters(package, package.find(self.target)))
        if problem:
            yield self.expectation(package.version), problem


@dataclass(frozen=True)
class Says(Entry):
    """Its text has these words and signs in a row: a value, or a behaviour that no name or signature shows."""

    text: Expected

    def expectation(self, version: str) -> str:
        return f"`{_of_version(self.text, version)}` in it"

    def _differences(self, package: Package) -> Iterator[tuple[str, str]]:
        text = ast.unparse(package.find(self.target).node)
        if _tokens(_of_version(self.text, package.version)) not in _tokens(text):
            shown = f"it reads `{text}`" if len(text) < 120 else "it has no such text"
            yield self.expectation(package.version), shown


@dataclass(frozen=True)
class TakesFieldsOf(Entry):
    """We pass all fields of a named tuple as keywords, and a few arguments of our own."""

    fields_of: str
    also: tuple[str, ...] = ()

    def expectation(self, version: str) -> str:
        return f"a parameter for each field of {self.fields_of.rpartition(':')[2]}"

    def _differences(self, package: Package) -> Iterator[tuple[str, str]]:
        fields = {*parameters(package, package.find(self.fields_of)), *self.also}
        taken = parameters(package, package.find(self.target))
        required = {name for name, is_required in taken.items() if is_required}
        if unknown := sorted(fields - set(taken)):
            yield self.expectation(package.version), f"it does not take {', '.join(unknown)}"
        if missing := sorted(required - fields):
            yield self.expectation(package.version), f"it also asks for {', '.join(missing)}"


@dataclass(frozen=True)
class Pins(Entry):
    """The exact version that vLLM asks for; ``target`` names the distribution."""

    versions: Mapping[str, str]

    def expectation(self, version: str) -> str:
        return f"{self.target}=={_of_version(self.versions, version)}"

    def _differences(self, package: Package) -> Iterator[tuple[str, str]]:
        found = [line for line in package.requirements() if re.match(rf"{self.target}\b[^-\w]", line)]
        expected = self.expectation(package.version)
        # A bare checkout has no metadata, so there is nothing to compare.
        if found and not any(re.match(rf"{re.escape(expected)}([+.;\s]|$)", line) for line in found):
            yield expected, f"it asks for {' and '.join(found)}"


def _function(found: Definition) -> Function:
    if not isinstance(found.node, Function):
        raise Moved(f"it is no function any more but `{ast.unparse(found.node).splitlines()[0]}`")
    return found.node


def _matches(expected: str, found: str) -> bool:
    """Whether the kinds are equal, and so are the parameters, ``...`` being any run of them."""
    kind, wanted = _split(expected)
    found_kind, names = _split(found)
    pattern = "".join(r"(?:[^\n]*\n)*" if name == "..." else re.escape(name) + r"\n" for name in wanted)
    return kind == found_kind and re.fullmatch(pattern, "".join(f"{name}\n" for name in names)) is not None


def _split(text: str) -> tuple[str, list[str]]:
    """``@classmethod (cls, x=f(1, 2))`` as ``@classmethod`` and its parameters."""
    kind, _, rest = text.partition("(")
    names, depth = [""], 0
    for character in rest[:-1]:
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(character, 0)
        if character == "," and depth == 0:
            names.append("")
        else:
            names[-1] += character
    return kind.strip(), [name.strip() for name in names if name.strip()]


def _misfit(call: ast.Call, taken: dict[str, bool]) -> str | None:
    """What is wrong with a call of a function with parameters ``taken`` (name: whether it must be given)."""
    given = [ast.unparse(argument) for argument in call.args]
    keywords = [keyword.arg for keyword in call.keywords if keyword.arg]
    named = [name for name in taken if not name.startswith("*")]
    if given != named[: len(given)]:
        return f"its first parameters are ({', '.join(named[: len(given)])})"
    if "**" not in taken and (unknown := [name for name in keywords if name not in named]):
        return f"it takes no {', '.join(unknown)}"
    missing = [name for name in named if taken[name] and name not in given + keywords]
    return f"it also asks for {', '.join(missing)}" if missing else None


def _tokens(text: str) -> str:
    """Words and signs, one a line, whatever the white space between them."""
    return "\n".join(["", *re.findall(r"\w+|[^\w\s]", text), ""])
