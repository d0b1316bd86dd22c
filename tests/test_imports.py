"""Which package of rlreason may import which, and what it may load: the rules as data, held against the source."""

import ast
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


#: The layers from the bottom up: a package imports only packages above it in this list. Of each: which heavy libraries
#: it may load while it is imported.
RULES = {
    **dict.fromkeys(("errors", "types", "settings", "runtime"), ""),
    **{"objectives": "torch", "config": "hydra", "records": "", "grading": "", "health": "", "data": "hydra"},
    **dict.fromkeys(("model", "engines", "evaluation"), "torch transformers"),
    **{"training": "torch transformers hydra", "sweeps": "hydra", "report": "", "discovery": ""},
    **{"courses": "torch transformers", "main": "", "cli": "hydra", "api": "hydra", "__main__": "", "rlreason": ""},
}
#: Modules of heavy packages that leave out torch and transformers.
LIGHT = {f"rlreason.objectives.{name}" for name in ("objective", "losses", "card", "published")}
LIGHT |= {"rlreason.model.memory", "rlreason.model.plan", "rlreason.training.preflight"}
PATHS = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(ROOT.glob("rlreason/**/*.py"))
}


def package_of(module: str) -> str:
    """Return the line of RULES that holds for a module of rlreason."""
    return module.split(".")[1] if "." in module else module


@cache
def imported_by(module: str) -> set[str]:
    """Return the modules of rlreason that a module imports, inside functions too, but for type checkers."""
    found, tree = set(), ast.parse(PATHS[module].read_text("utf-8"))
    for guard in [n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]:
        guard.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module}: write rlreason.{node.module} instead of a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in PATHS else str(node.module) for name in names}
    return found & (PATHS.keys() - {"rlreason", module})  # the bare package holds the version alone


def test_packages_import_only_packages_above_them_and_modules_one_another_in_no_circle():
    """Bug: a package of the bottom depends on one that is built upon it."""
    order = list(RULES)
    pairs = [(module, target) for module in PATHS for target in imported_by(module)]
    against = [pair for pair in pairs if order.index(package_of(pair[1])) > order.index(package_of(pair[0]))]
    assert not against, "move what is needed to a lower package, or pass it in as an argument"
    TopologicalSorter({module: imported_by(module) for module in PATHS}).prepare()


WITHOUT = """
import importlib, sys
for module in sys.argv[2:]:
    importlib.import_module(module)
    assert sys.argv[1] not in sys.modules, f"{module} loads {sys.argv[1]}: import it inside the function that needs it"
"""


@pytest.mark.parametrize("library", ["torch", "transformers", "hydra"])
def test_light_modules_load_nothing_heavy(library):
    """Bug: an answer of the command line waits seconds for a library that it does not need."""
    light = {module for module in PATHS if library not in RULES[package_of(module)]}
    light |= LIGHT if library != "hydra" else set()
    layers = sorted(light, key=lambda module: list(RULES).index(package_of(module)))
    command = [sys.executable, "-c", WITHOUT, library, *layers]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
