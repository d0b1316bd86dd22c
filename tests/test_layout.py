"""Limits for the whole package: how long modules and functions are, and what needs a docstring."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).resolve().parents[1] / "rlreason"
TOP_LEVEL_FILES = 10
FUNCTION_LINES = 80
FILE_LINES = 500

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Source(NamedTuple):
    """One module: its path relative to the package's parent, its text and its syntax tree."""

    path: str
    text: str
    tree: ast.Module


@cache
def sources_of(root: Path) -> list[Source]:
    """Every module of the package at `root`."""
    texts = {path.relative_to(root.parent).as_posix(): path.read_text("utf-8") for path in sorted(root.rglob("*.py"))}
    return [Source(path, text, ast.parse(text)) for path, text in texts.items()]


def top_level_files(sources: list[Source]) -> list[str]:
    """Modules that lie in no package but the outermost."""
    return [source.path for source in sources if source.path.count("/") == 1]


def long_files(sources: list[Source], limit: int = FILE_LINES) -> list[str]:
    """Files of more than `limit` lines."""
    return [f"{s.path}: {n} lines" for s in sources if (n := len(s.text.splitlines())) > limit]


def long_functions(sources: list[Source], limit: int = FUNCTION_LINES) -> list[str]:
    """Functions of more than `limit` lines with their docstring; courses/ shows the handouts' own."""
    return [
        f"{s.path}:{node.lineno}: {node.name} has {n} lines"
        for s in sources
        for node in ast.walk(s.tree)
        if isinstance(node, Function) and "/courses/" not in s.path
        if (n := (node.end_lineno or 0) - node.lineno + 1) > limit
    ]


def undocumented(sources: list[Source]) -> tuple[list[str], int]:
    """Return what lacks a docstring, and how many need one: modules, and public names that other modules mention.

    A method counts as documented where the method of the same name in a base class of this package is. Names are
    compared bare, so two classes or methods of one name count as one.
    """
    classes: dict[str, list[ast.ClassDef]] = {}
    mentioned_in: dict[str, set[str]] = {}
    for source in sources:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, []).append(node)
            if isinstance(node, ast.Name | ast.Attribute | ast.alias):
                mentioned_in.setdefault(_bare_name(node), set()).add(source.path)
    missing, count = [], 0
    for source in sources:
        if source.text.strip():
            count += 1
            missing += [] if ast.get_docstring(source.tree) else [f"{source.path}:1: the module"]
        for name, node, owner in _public(source.tree):
            if not mentioned_in.get(node.name, set()) - {source.path}:
                continue
            count += 1
            if not ast.get_docstring(node) and not (owner and _inherits(owner, node.name, classes)):
                missing.append(f"{source.path}:{node.lineno}: {name}")
    return missing, count


def _bare_name(node: ast.Name | ast.Attribute | ast.alias) -> str:
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else node.name.rpartition(".")[2]


def _public(
    tree: ast.Module | ast.ClassDef, prefix: str = ""
) -> Iterator[tuple[str, ast.ClassDef | Function, ast.ClassDef | None]]:
    """Public definitions with their full name and, for methods, the class; those inside functions are nobody's."""
    for node in _flat(tree.body):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            if not _is_accessory(node):
                yield prefix + node.name, node, tree if isinstance(tree, ast.ClassDef) else None
            if isinstance(node, ast.ClassDef):
                yield from _public(node, f"{prefix}{node.name}.")


def _flat(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a body, with those that stand under an `if` or `try` in it."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _flat([*node.body, *node.orelse])


def _is_accessory(node: ast.ClassDef | Function) -> bool:
    """Setters and overloads: their property or last definition speaks for them."""
    return any(ast.unparse(mark).endswith((".setter", "overload")) for mark in node.decorator_list)


def _inherits(owner: ast.ClassDef, method: str, classes: dict[str, list[ast.ClassDef]]) -> bool:
    """Whether a base class of the package, at any distance, documents the method."""
    for base in owner.bases:
        bare = base.value if isinstance(base, ast.Subscript) else base
        for ancestor in classes.get(ast.unparse(bare).rpartition(".")[2], []):
            of_same_name = (n for n in ancestor.body if isinstance(n, Function) and n.name == method)
            if ancestor is not owner and (
                any(map(ast.get_docstring, of_same_name)) or _inherits(ancestor, method, classes)
            ):
                return True
    return False


def listed(title: str, lines: list[str]) -> str:
    """A failure's text: the rule, and each place that breaks it."""
    return "\n  ".join([title, *lines])


def test_few_files_lie_at_the_top() -> None:
    found = top_level_files(sources_of(PACKAGE))
    rule = (
        f"{len(found)} files lie in rlreason/ itself, more than {TOP_LEVEL_FILES}: put each into the package it serves"
    )
    assert len(found) <= TOP_LEVEL_FILES, listed(rule, found)


def test_files_can_be_read_in_one_sitting() -> None:
    bad = long_files(sources_of(PACKAGE))
    assert not bad, listed(
        f"{len(bad)} files of more than {FILE_LINES} lines: split each where its subject changes", bad
    )


def test_functions_are_short() -> None:
    bad = long_functions(sources_of(PACKAGE))
    rule = f"{len(bad)} functions of more than {FUNCTION_LINES} lines: give a step of each a name and a function"
    assert not bad, listed(rule, bad)


def test_what_other_modules_use_has_a_docstring() -> None:
    bad, count = undocumented(sources_of(PACKAGE))
    assert count > 100  # of a package of this size; fewer means that they were not found
    assert not bad, listed(f"{len(bad)} of {count} names that other modules use have no docstring", bad)


def test_the_reading_of_docstrings(tmp_path) -> None:
    package = tmp_path / "rlreason"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "base.py").write_text(
        '"""It."""\nclass Base:\n    """A base."""\n    def run(self):\n        """Run."""\n'
    )
    (package / "part.py").write_text(
        "from rlreason import base\nclass Part(base.Base):\n    def __init__(self): ...\n    def run(self):\n"
        "        def inner(): ...\n    def stop(self): ...\n    @property\n    def x(self):\n        '''An x.'''\n"
        "    @x.setter\n    def x(self, to): ...\nclass _Own:\n    def run(self): ...\ndef alone(): ...\nalone()\n"
    )
    (package / "user.py").write_text(
        '"""It."""\nfrom rlreason.part import Part\npart = Part()\npart.run()\npart.stop()\npart.x = part.x\n'
    )
    sources = sources_of(package)
    expected = ["rlreason/part.py:1: the module", "rlreason/part.py:2: Part", "rlreason/part.py:6: Part.stop"]
    # Three modules and Base, Base.run, Part, Part.run, Part.stop, Part.x. `alone` is used in its own module only.
    assert undocumented(sources) == (expected, 9)
    assert long_functions(sources, limit=1)[1:] == [
        "rlreason/part.py:4: run has 2 lines",
        "rlreason/part.py:8: x has 2 lines",
    ]
    assert len(top_level_files(sources)) == 4
    assert long_files(sources, limit=6) == ["rlreason/part.py: 15 lines"]


def test_the_architecture_page_names_every_package():
    page = (PACKAGE.parent / "docs/architecture.md").read_text("utf-8")
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert {name for name in packages if f"{name}/" not in page} == set()


CLOCKS = {"monotonic", "perf_counter", "process_time", "ru_utime", "ru_maxrss", "memory_info"}


def test_no_default_test_measures_time_or_memory() -> None:
    """A machine that has something else to do would fail it. The tests of the clock itself hold sums and bounds."""
    measuring = []
    for path in sorted(set(Path(__file__).parent.glob("test_*.py")) - {Path(__file__).with_name("test_clock.py")}):
        tree = ast.parse(path.read_text("utf-8"))
        marks = [
            ast.unparse(mark)
            for node in tree.body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
            for mark in ast.walk(node.value)
        ]
        for test in (node for node in tree.body if isinstance(node, Function) and node.name.startswith("test_")):
            if "pytest.mark.long" in [*map(ast.unparse, test.decorator_list), *marks]:
                continue
            read = {node.attr for node in ast.walk(test) if isinstance(node, ast.Attribute)}
            measuring += [f"{path.name}: {test.name} reads {name}" for name in sorted(read & CLOCKS)]
    assert not measuring, listed("wait for a state, use a fake clock, or mark the test as long", measuring)
