# SPDX-License-Identifier: Apache-2.0
"""vLLM as text: where a name is defined, what a class has, what a function takes, without importing anything.

Reading instead of importing lets one table be checked on a machine without a GPU, where vLLM's GPU modules do not import, and
against an unpacked wheel of a version that is not installed.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef
_KINDS = ("property", "cached_property", "classmethod", "staticmethod")


class Moved(Exception):  # noqa: N818 (a finding, not a failure of ours)
    """Something is not where it was; the text says what was found instead."""


@dataclass(frozen=True)
class Definition:
    """A statement of vLLM's that gives a name its meaning."""

    module: str
    node: ast.AST


class Package:
    """The sources of one package, parsed when first asked for.

    A target is ``module:Name`` or ``module:Class.member``, the module without the package's own name.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files: set[Path] = set()
        """Those that were read."""
        # Methods are cached per instance, and an instance lives as long as a test.
        self.statements = cache(self._statements)
        self.members = cache(self._members)

    @property
    def version(self) -> str:
        """Of ``_version.py``, which every wheel has; empty in a bare checkout."""
        path = self.root / "_version.py"
        found = re.search(r"^__version__ = .*?'(.+?)'", path.read_text(), re.MULTILINE) if path.is_file() else None
        return found[1] if found else ""

    def requirements(self) -> list[str]:
        """``Requires-Dist`` of all distributions of this package that lie beside it."""
        return [
            line.removeprefix("Requires-Dist: ")
            for path in sorted(self.root.parent.glob(f"{self.root.name}-*.dist-info/METADATA"))
            + sorted(self.root.parent.glob(f"{self.root.name}_cpu-*.dist-info/METADATA"))
            for line in path.read_text().splitlines()
            if line.startswith("Requires-Dist: ")
        ]

    def find(self, target: str) -> Definition:
        """The definition of ``target``, through re-exports and base classes.

        Raises:
            Moved: if there is none.
        """
        module, _, path = target.partition(":")
        name, _, member = path.partition(".")
        found = self._named(module, name)
        return self._member(found, name, member) if member else found

    def _member(self, owner: Definition, name: str, member: str) -> Definition:
        if not isinstance(owner.node, ast.ClassDef):
            raise Moved(f"{name} is no class any more")
        members = self.members(owner)
        if member not in members:
            raise Moved(f"{name} has no {member}{_similar(member, members)}")
        return members[member]

    def _named(self, module: str, name: str) -> Definition:
        statements = self.statements(module)
        if name not in statements:
            raise Moved(f"the module has no {name}{_similar(name, statements)}")
        node = statements[name]
        if isinstance(node, ast.ImportFrom):
            origin = self._origin(module, node)
            imported = next(alias.name for alias in node.names if (alias.asname or alias.name) == name)
            if origin is not None:
                is_module = self._file(f"{origin}.{imported}" if origin else imported) is not None
                return Definition(module, node) if is_module else self._named(origin, imported)
        return Definition(module, node)

    def _origin(self, module: str, node: ast.ImportFrom) -> str | None:
        """The module of this package that ``node`` imports from; None for another package's."""
        name = node.module or ""
        if node.level:
            file = self._file(module)
            parts = module.split(".") if file is not None and file.name == "__init__.py" else module.split(".")[:-1]
            parts = parts[: len(parts) - node.level + 1]
            return ".".join([*parts, *([name] if name else [])])
        first, _, rest = name.partition(".")
        return rest if first == self.root.name else None

    def _file(self, module: str) -> Path | None:
        path = self.root.joinpath(*module.split(".")) if module else self.root
        candidates = [path.with_suffix(".py"), path / "__init__.py"] if module else [path / "__init__.py"]
        return next((candidate for candidate in candidates if candidate.is_file()), None)

    def _statements(self, module: str) -> dict[str, ast.AST]:
        """What a module binds, by name."""
        file = self._file(module)
        if file is None:
            raise Moved(f"there is no module {self.root.name}.{module}")
        self.files.add(file)
        return dict(_bindings(_parsed(file.read_text()).body))

    def _members(self, owner: Definition) -> dict[str, Definition]:
        """What instances of a class have: its own names, what its methods store in ``self``, and its bases' names."""
        assert isinstance(owner.node, ast.ClassDef)
        found: dict[str, Definition] = {}
        for base in reversed(owner.node.bases):
            found |= self._inherited(owner.module, base)
        stored = {name: Definition(owner.module, node) for name, node in _stored(owner.node)}
        own = {name: Definition(owner.module, node) for name, node in _bindings(owner.node.body)}
        return found | stored | own

    def _inherited(self, module: str, base: ast.expr) -> dict[str, Definition]:
        if isinstance(base, ast.Subscript):  # Base[T]
            base = base.value
        if not isinstance(base, ast.Name):
            return {}
        try:
            found = self._named(module, base.id)
        except Moved:  # a builtin
            return {}
        return self.members(found) if isinstance(found.node, ast.ClassDef) else {}


@cache
def _parsed(text: str) -> ast.Module:
    """Trees are only read, so copies of a package share those of equal files."""
    return ast.parse(text)


def _bindings(body: list[ast.stmt]) -> Iterator[tuple[str, ast.AST]]:
    """Names that a block of statements binds, in whichever branch."""
    for node in body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name, node
            case ast.Import() | ast.ImportFrom():
                yield from ((alias.asname or alias.name, node) for alias in node.names)
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name, node
            case ast.Assign():
                yield from ((t.id, node) for t in node.targets if isinstance(t, ast.Name))
            case ast.If() | ast.Try() | ast.With():
                for field in ("orelse", "finalbody", "body"):  # the main branch wins
                    yield from _bindings(getattr(node, field, []))


def _stored(owner: ast.ClassDef) -> Iterator[tuple[str, ast.AST]]:
    for node in ast.walk(owner):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            elements = target.elts if isinstance(target, ast.Tuple) else [target]
            for element in elements:
                match element:
                    case ast.Attribute(value=ast.Name(id="self"), attr=name):
                        yield name, node


def signature(node: ast.AST) -> str:
    """``@classmethod (cls, spec, flag=False)``: how a function is bound, and its parameters with their defaults."""
    assert isinstance(node, Function)
    names = [ast.unparse(decorator).rpartition(".")[2] for decorator in node.decorator_list]
    kind = next((f"@{name} " for name in names if name in _KINDS), "")
    arguments = ast.parse(f"lambda {ast.unparse(_bare(node.args))}: 0", mode="eval").body
    assert isinstance(arguments, ast.Lambda)
    return f"{kind}({ast.unparse(arguments.args)})"


def _bare(arguments: ast.arguments) -> ast.arguments:
    """Without annotations."""

    def bare(argument: ast.arg | None) -> ast.arg | None:
        return ast.arg(argument.arg) if argument is not None else None

    return ast.arguments(
        posonlyargs=[ast.arg(a.arg) for a in arguments.posonlyargs],
        args=[ast.arg(a.arg) for a in arguments.args],
        vararg=bare(arguments.vararg),
        kwonlyargs=[ast.arg(a.arg) for a in arguments.kwonlyargs],
        kw_defaults=arguments.kw_defaults,
        kwarg=bare(arguments.kwarg),
        defaults=arguments.defaults,
    )


def _similar(name: str, names: dict[str, ast.AST] | dict[str, Definition]) -> str:
    close = difflib.get_close_matches(name, names, n=2, cutoff=0.75)
    return f" (but {' and '.join(close)})" if close else ""


def parameters(package: Package, found: Definition) -> dict[str, bool]:
    """What a call of a function or a class may or must give: name to whether it has no default; ``*`` and ``**`` for the rest."""
    if isinstance(found.node, Function):
        return _function_parameters(found.node)
    if not isinstance(found.node, ast.ClassDef):
        raise Moved(f"it cannot be called any more: `{ast.unparse(found.node).splitlines()[0]}`")
    members = package.members(found)
    if "__init__" in members:
        return _function_parameters(members["__init__"].node)
    fields = {name: member.node for name, member in members.items() if isinstance(member.node, ast.AnnAssign)}
    return {
        name: node.value is None
        for name, node in fields.items()
        if not ast.unparse(node.annotation).startswith("ClassVar")
    }


def _function_parameters(node: ast.AST) -> dict[str, bool]:
    """Without ``self`` and ``cls``."""
    assert isinstance(node, Function)
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    num_required = len(positional) - len(arguments.defaults)
    taken = {argument.arg: index < num_required for index, argument in enumerate(positional)}
    taken |= {"*": False} if arguments.vararg else {}
    taken |= {
        argument.arg: default is None
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    }
    taken |= {"**": False} if arguments.kwarg else {}
    return {name: must for name, must in taken.items() if name not in ("self", "cls")}
