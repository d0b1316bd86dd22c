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
    """What a package may import of rlreason, anywhere in it, and which heavy libraries while it is imported."""

    imports: str
    loads: str = ""


#: What the packages that put a run together bring with them.
ALL = "torch transformers hydra"
#: From the bottom up: a line names lines above it alone, so no arrow runs back. A package not yet there is reserved.
RULES = {
    "errors": Rule(""),
    "types": Rule(""),
    "statistics": Rule(""),
    "runtime": Rule("errors"),
    "plugins": Rule("errors"),
    "objectives": Rule("errors types plugins", "torch"),
    "config": Rule("errors types runtime plugins objectives", "hydra"),
    "monitors": Rule("errors statistics config"),
    "memory": Rule("errors runtime config"),
    "answers": Rule("errors types"),
    "grading": Rule("errors types runtime plugins config answers"),
    "data": Rule("errors types runtime plugins config grading"),
    "optimization": Rule("errors config", "torch"),
    "model": Rule("errors types runtime config data", "torch transformers"),
    "engines": Rule("errors types runtime config memory model", "torch transformers"),
    "learner": Rule("errors types statistics runtime objectives config optimization model", "torch transformers"),
    "distributed": Rule("errors types runtime objectives config model learner", "torch transformers"),
    "records": Rule("errors types statistics runtime config monitors"),
    "health": Rule("errors types statistics runtime config monitors grading records"),
    "algorithms": Rule("errors types statistics runtime objectives config grading data model engines", "torch"),
    "evaluation": Rule(
        "errors types statistics runtime config monitors answers grading data model engines records algorithms"
    ),
    "progress": Rule(
        "errors types runtime config monitors grading optimization model engines learner distributed records algorithms"
        " evaluation",
        "torch transformers",
    ),
    "sweeps": Rule("errors types statistics runtime config memory records evaluation"),
    "report": Rule("errors types statistics runtime config monitors grading records health evaluation sweeps"),
    "setup": Rule(
        "errors types statistics runtime plugins objectives config monitors memory grading data optimization model"
        " distributed engines learner records algorithms evaluation",
        ALL,
    ),
    "discovery": Rule("errors statistics runtime config records report"),
    "cli": Rule("errors runtime plugins objectives config records sweeps setup discovery", "hydra"),
    "analysis": Rule(
        "errors types statistics runtime objectives config grading data model learner records algorithms evaluation"
        " setup cli",
        ALL,
    ),
    "courses": Rule("errors types objectives grading data model engines", "torch transformers"),
    "doctor": Rule("errors statistics runtime config memory model records sweeps setup cli"),
    "check": Rule("errors types runtime plugins objectives data model records courses", "torch transformers"),
    "interrupted": Rule("errors runtime config records progress setup", ALL),
    "trainer": Rule(
        "errors types runtime objectives config grading optimization learner records algorithms evaluation progress"
        " setup cli interrupted",
        ALL,
    ),
    "jobs": Rule(
        "errors types statistics runtime plugins config monitors grading data model distributed records algorithms"
        " evaluation setup cli trainer discovery",
        ALL,
    ),
    "api": Rule("errors runtime plugins config distributed records cli jobs", "hydra"),
    "multirun": Rule("errors statistics runtime config records sweeps report setup cli", "hydra"),
    "main": Rule(
        "errors runtime config distributed records report sweeps cli multirun discovery jobs analysis", "hydra"
    ),
    "rerun": Rule("errors runtime records cli main", "hydra"),
    "__main__": Rule("runtime distributed cli jobs main"),
    "__init__": Rule("runtime grading cli api"),  # grading and api when asked for; it holds the version too
}
#: Library -> the imports that load it.
HEAVY = {
    "torch": ("torch", "safetensors.torch", "vllm", "peft", "bitsandbytes"),
    "transformers": ("transformers",),
    "hydra": ("hydra",),
}
CURE = "move what is needed to a lower package, pass it in as an argument, or change RULES in tests/test_imports.py"


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

    >>> package_of("rlreason.engines.hf.engine"), package_of("rlreason.trainer"), package_of("rlreason")
    ('engines', 'trainer', '__init__')
    """
    return (*module.split("."), "__init__")[1]


def is_own(module: str) -> bool:
    """Whether a module is one of rlreason's; the bare package counts as none, since it holds the version alone."""
    return module.startswith("rlreason.")


def unruled(imports: list[Import]) -> list[str]:
    """Packages without a line in RULES."""
    return sorted({package_of(i.importer) for i in imports} - set(RULES))


def forbidden(imports: list[Import]) -> list[str]:
    """Imports between packages that RULES does not name."""
    found = []
    for importer, where, target, _ in imports:
        a, b = package_of(importer), package_of(target)
        if is_own(target) and a != b and a in RULES and b not in RULES[a].imports.split():
            found.append(f"{where}: {a} must not import {target}")
    return found


def loading(imports: list[Import]) -> list[str]:
    """Where a package that may not load a library takes it, or takes in a package that may and does."""
    found = []
    for library, names in HEAVY.items():
        allowed = {package for package, rule in RULES.items() if library in rule.loads.split()}
        heavy = set(names)
        while new := {i.importer for i in imports if i.at_once and heavy.intersection(_with_parents(i.target))} - heavy:
            heavy |= new
        for importer, where, target, at_once in imports:
            light = package_of(importer) in RULES.keys() - allowed
            at_fault = light and at_once and not (is_own(target) and package_of(target) in RULES.keys() - allowed)
            if at_fault and heavy.intersection(_with_parents(target)):
                found.append(f"{where}: importing {package_of(importer)} must not load {library}, and {target} does")
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


def test_no_rule_points_back_up() -> None:
    names = list(RULES)
    for n, (name, rule) in enumerate(RULES.items()):
        up = sorted(set(rule.imports.split()) - set(names[:n]))
        assert not up, f"RULES[{name!r}] names {up}, which stand below it or nowhere: a line may name lines above it"
        assert set(rule.loads.split()) <= set(HEAVY)


def test_every_package_has_a_rule() -> None:
    bad = unruled(imports_of(PACKAGE))
    assert not bad, listed("packages without a rule", bad, "give each a line in RULES of tests/test_imports.py")


def test_packages_import_only_what_their_rule_names() -> None:
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
            "def f():\n    from rlreason import trainer\nfrom . import store\n"
            "if __name__ == '__main__':\n    import vllm\n"
        ),
        "config/store": "try:\n    import rlreason.trainer\nexcept ImportError:\n    pass\n",
        "trainer": "import torch\nfrom rlreason.config import run\n",
    }
    for name, text in files.items():
        file = tmp_path / "rlreason" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    imports = imports_of(tmp_path / "rlreason")
    assert [i[1:] for i in imports if i.importer == "rlreason.config.run"] == [
        ("rlreason/config/run.py:1", "typing", True),
        ("rlreason/config/run.py:5", "hydra", True),
        ("rlreason/config/run.py:7", "rlreason.trainer", False),
        ("rlreason/config/run.py:8", "rlreason.config.store", True),
        ("rlreason/config/run.py:10", "vllm", False),
    ]
    assert forbidden(imports) == [
        "rlreason/config/run.py:7: config must not import rlreason.trainer",
        "rlreason/config/store.py:2: config must not import rlreason.trainer",
    ]
    to_trainer = "rlreason/config/store.py:2: importing config must not load torch, and rlreason.trainer does"
    assert loading(imports) == [to_trainer]
    assert len(circle(imports)) in (2, 3)  # straight back, or by way of the store
    assert not circle([i for i in imports if i.importer != "rlreason.trainer"])
