"""Which package of rlreason may import which, and what it may load: the rules as data, held against the source."""

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).resolve().parents[1] / "rlreason"


class Rule(NamedTuple):
    """Which heavy libraries a package may load while it is imported, and which of its modules leave out torch."""

    loads: str = ""
    light: str = ""


ALL = "torch transformers hydra"
#: The layers from the bottom up: a package imports only packages above it in this list.
RULES = {
    "errors": Rule(),
    "types": Rule(),
    "settings": Rule(),
    "runtime": Rule(),
    "objectives": Rule("torch", "objective rules losses card published"),
    "config": Rule("hydra"),
    "records": Rule(),
    "grading": Rule(),
    "health": Rule(),
    "data": Rule("hydra"),
    "model": Rule("torch transformers", "memory fitting savings shapes"),
    "engines": Rule("torch transformers"),
    "evaluation": Rule("torch transformers"),
    "training": Rule(ALL, "preflight"),
    "sweeps": Rule("hydra"),
    "report": Rule(),
    "discovery": Rule(),
    "courses": Rule("torch transformers"),
    "main": Rule(),
    "cli": Rule("hydra"),
    "api": Rule("hydra"),
    "__main__": Rule(),
    "__init__": Rule(),  # it imports grading and api when they are asked for
}
#: Library -> the imports that load it.
HEAVY = {
    "torch": ("torch", "safetensors.torch", "vllm", "peft", "bitsandbytes"),
    "transformers": ("transformers",),
    "hydra": ("hydra",),
}
CURE = "move what is needed to a lower package, or pass it in as an argument"


class Import(NamedTuple):
    """One imported module: by whom, where, and whether that happens while the importer itself is imported."""

    importer: str
    where: str
    target: str
    at_once: bool


@cache
def imports_of(root: Path) -> list[Import]:
    """Every import in the package at `root` but those for type checkers; of its own modules, the module is named."""
    paths = {".".join(path.relative_to(root.parent).with_suffix("").parts): path for path in sorted(root.rglob("*.py"))}
    modules = {name.removesuffix(".__init__"): path for name, path in paths.items()}
    found = []
    for name, path in modules.items():
        package = name if path.stem == "__init__" else name.rpartition(".")[0]
        for node, at_once in _import_statements(ast.parse(path.read_text("utf-8")), True):
            where = f"{path.relative_to(root.parent)}:{node.lineno}"
            for target in _targets(node, package, modules):
                found.append(Import(name, where, target, at_once))
    return list(dict.fromkeys(found))


def _import_statements(node: ast.AST, at_once: bool) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, at_once
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for other in child.orelse:
                yield from _import_statements(ast.Module([other], []), at_once)
        else:
            later = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            later |= isinstance(child, ast.If) and ast.unparse(child.test).startswith("__name__ ==")
            yield from _import_statements(child, at_once and not later)


def _targets(node: ast.Import | ast.ImportFrom, package: str, modules: dict[str, Path]) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    above = package.rsplit(".", node.level - 1)[0] if node.level else ""
    source = ".".join(filter(None, (above, node.module)))
    return [name if (name := f"{source}.{alias.name}") in modules else source for alias in node.names]


def package_of(module: str) -> str:
    """The line of RULES that holds for a module of rlreason.

    >>> package_of("rlreason.engines.hf.engine"), package_of("rlreason.types"), package_of("rlreason")
    ('engines', 'types', '__init__')
    """
    return (*module.split("."), "__init__")[1]


def is_own(module: str) -> bool:
    """Whether a module is one of rlreason's; the bare package counts as none, since it holds the version alone."""
    return module.startswith("rlreason.")


def unruled(imports: list[Import]) -> list[str]:
    """Packages without a line in RULES."""
    return sorted({package_of(i.importer) for i in imports} - set(RULES))


def forbidden(imports: list[Import]) -> list[str]:
    """Imports of packages that do not stand above the importer's in RULES."""
    order, found = list(RULES), []
    for importer, where, target, _ in imports:
        a, b = package_of(importer), package_of(target)
        if is_own(target) and a != b and {a, b} <= set(RULES) and order.index(b) > order.index(a):
            found.append(f"{where}: {a} must not import {target}")
    return found


def may_load(module: str, library: str) -> bool:
    """Whether a module may load a library while it is imported; what is not ruled may.

    >>> may_load("rlreason.model.policy", "torch"), may_load("rlreason.model.memory", "torch")
    (True, False)
    """
    rule = RULES.get(package_of(module))
    if rule is None:
        return True
    light = library != "hydra" and module.rpartition(".")[2] in rule.light.split()
    return library in rule.loads.split() and not light


def loading(imports: list[Import]) -> list[str]:
    """Where a module that may not load a library takes it, or takes in a module that may and does."""
    found = []
    for library, names in HEAVY.items():
        heavy = set(names)
        while new := {i.importer for i in imports if i.at_once and heavy.intersection(_with_parents(i.target))} - heavy:
            heavy |= new
        for importer, where, target, at_once in imports:
            at_fault = at_once and not may_load(importer, library)
            at_fault &= not is_own(target) or may_load(target, library)
            if at_fault and heavy.intersection(_with_parents(target)):
                found.append(f"{where}: importing {importer} must not load {library}, and {target} does")
    return found


def _with_parents(module: str) -> list[str]:
    """What Python imports on the way to a module, but for rlreason itself.

    >>> _with_parents("rlreason.engines.hf.engine")
    ['rlreason.engines', 'rlreason.engines.hf', 'rlreason.engines.hf.engine']
    """
    parts = module.split(".")
    return [".".join(parts[:n]) for n in range(1 + is_own(module), len(parts) + 1)]


def circle(imports: list[Import]) -> list[str]:
    """The imports of one circle between modules, those inside functions included; empty where there is none."""
    graph: dict[str, set[str]] = {}
    for i in imports:
        if is_own(i.target) and i.target != i.importer:
            graph.setdefault(i.importer, set()).add(i.target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        steps = set(pairwise(reversed(error.args[1])))
        return [f"{i.where}: {i.importer} imports {i.target}" for i in imports if (i.importer, i.target) in steps]
    return []


def listed(title: str, lines: list[str], cure: str = CURE) -> str:
    """A failure's text: what is wrong, where, and what helps."""
    return "\n  ".join([f"{len(lines)} {title}:", *lines, f"cure: {cure}"])


def test_every_package_has_a_rule() -> None:
    bad = unruled(imports_of(PACKAGE))
    assert not bad, listed("packages without a rule", bad, "give each a line in RULES of tests/test_imports.py")


def test_packages_import_only_packages_above_them() -> None:
    bad = forbidden(imports_of(PACKAGE))
    assert not bad, listed("imports against RULES", bad)


def test_light_packages_load_nothing_heavy() -> None:
    bad = loading(imports_of(PACKAGE))
    assert not bad, listed("imports of something heavy", bad, f"import it inside the function that needs it, or {CURE}")


def test_modules_import_one_another_in_no_circle() -> None:
    bad = circle(imports_of(PACKAGE))
    assert not bad, listed("imports form a circle", bad, "move what both need into a third module below them")


def test_the_reading_of_imports(tmp_path) -> None:
    files = {
        "__init__": "",
        "config/__init__": "",
        "config/run": (
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import transformers\nelse:\n    import hydra\n"
            "def f():\n    from rlreason.model import policy\nfrom . import store\n"
            "if __name__ == '__main__':\n    import vllm\n"
        ),
        "config/store": "try:\n    import rlreason.model.policy\nexcept ImportError:\n    pass\n",
        "model/__init__": "",
        "model/policy": "import torch\nfrom rlreason.config import run\n",
    }
    for name, text in files.items():
        file = tmp_path / "rlreason" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    imports = imports_of(tmp_path / "rlreason")
    assert [i[1:] for i in imports if i.importer == "rlreason.config.run"] == [
        ("rlreason/config/run.py:1", "typing", True),
        ("rlreason/config/run.py:5", "hydra", True),
        ("rlreason/config/run.py:7", "rlreason.model.policy", False),
        ("rlreason/config/run.py:8", "rlreason.config.store", True),
        ("rlreason/config/run.py:10", "vllm", False),
    ]
    assert forbidden(imports) == [
        "rlreason/config/run.py:7: config must not import rlreason.model.policy",
        "rlreason/config/store.py:2: config must not import rlreason.model.policy",
    ]
    of_torch = [line for line in loading(imports) if "must not load torch" in line]
    assert [line.partition(": ")[0] for line in of_torch] == ["rlreason/config/store.py:2"]
    assert len(circle(imports)) in (2, 3)  # straight back, or by way of the store
    assert not circle([i for i in imports if i.importer != "rlreason.model.policy"])
