"""Which package of rlreason may import which, and what it may load: the rules as data, held against the source."""

import ast
import importlib
import json
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from tests.starts import forked

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


ONE_BY_ONE = """
import importlib, json, sys
for module, heavy in json.loads(sys.argv[1]):
    importlib.import_module(module)
    found = set(heavy) & sys.modules.keys()
    assert not found, f"{module} loads {found}: import it inside the function that needs it"
"""


def without_hydra(modules: list[str]) -> None:
    """Import modules in a fork of this process: only rlreason and Hydra are imported anew."""
    for name in [name for name in sys.modules if name.partition(".")[0] in ("rlreason", "hydra")]:
        del sys.modules[name]
    for module in modules:
        importlib.import_module(module)
        assert "hydra" not in sys.modules, f"{module} loads hydra: import it inside the function that needs it"


def test_light_modules_load_nothing_heavy():
    """Bug: an answer of the command line waits seconds for a library that it does not need."""
    layers = sorted(PATHS, key=lambda module: list(RULES).index(package_of(module)))
    heavy = {
        m: [of for of in ("torch", "transformers") if m in LIGHT or of not in RULES[package_of(m)]] for m in layers
    }
    lightest_first = sorted(((m, of) for m, of in heavy.items() if of), key=lambda pair: -len(pair[1]))
    command = [sys.executable, "-c", ONE_BY_ONE, json.dumps(lightest_first)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    others = [module for module in layers if "hydra" not in RULES[package_of(module)]]
    assert forked(without_hydra, others) == 0, "its traceback is on standard error"
