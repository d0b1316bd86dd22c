"""Do the tests notice? Applies small mistakes to the objectives, one at a time, and runs their tests on each.

    python tests/mutate_objectives.py            all mutants, two at a time
    python tests/mutate_objectives.py losses     those of one module

Every mutant is a copy of the package in a temporary folder; the checkout is never touched. Exit code 1 if the
tests pass on any mutant, or if a mutation no longer fits the code. Torch is imported once, and every mutant
is judged in a fork of that process.
"""

import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from objective_mutants import MUTANTS

ROOT = Path(__file__).resolve().parents[1]
#: The test files that run on a mutant of a module, where they are others than those of `terms`.
TESTS = {
    "advantages": ("advantages", "terms"),
    "losses": ("losses", "rules", "terms"),
    "aggregation": ("losses",),
    "published": ("rules",),
    "card": ("rules",),
}
#: Stop at the first failure and prepare no report on it: only the exit code is read.
QUICKLY = ("-x", "-q", "--tb=no", "--assert=plain", "-p", "no:cacheprovider", "-p", "no:hypothesispytest")


def run_tests(module: str, old: str = "", new: str = "") -> pytest.ExitCode:
    """Run the module's tests on a copy of the package in which `new` stands for `old` in that module."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(ROOT / "rlreason", folder / "rlreason", ignore=shutil.ignore_patterns("__pycache__"))
        (folder / "tests").mkdir()
        for test in (ROOT / "tests").glob("test_objectives*.py"):
            shutil.copy(test, folder / "tests")
        source = folder / "rlreason" / "objectives" / f"{module}.py"
        source.write_text(source.read_text().replace(old, new) if old else source.read_text())
        files = [f"tests/test_objectives_{part}.py" for part in TESTS.get(module, ("terms",))]
        os.chdir(folder)
        sys.path.insert(0, str(folder))
        return pytest.ExitCode(pytest.main([*QUICKLY, *files]))


def judge(mutant: tuple[str, str, str]) -> str:
    """Say what became of one mutant, or what is wrong with the mutation itself; only in a process of its own."""
    module, old, _ = mutant
    if (ROOT / "rlreason" / "objectives" / f"{module}.py").read_text().count(old) != 1:
        return "DOES NOT FIT"
    outcomes = {pytest.ExitCode.TESTS_FAILED: "killed", pytest.ExitCode.OK: "SURVIVED"}
    return outcomes.get(run_tests(*mutant), "DOES NOT RUN")


def be_quiet() -> None:
    """A judging process prints nothing, uses one thread, and leaves no compiled files behind."""
    torch.set_num_threads(1)
    sys.dont_write_bytecode = True
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main(modules: list[str]) -> int:
    """Judge every mutant (of the named modules), print one line each, and return the exit code."""
    started = time.monotonic()
    mutants = [mutant for mutant in MUTANTS if not modules or mutant[0] in modules]
    fork = multiprocessing.get_context("fork")
    with fork.Pool(2, initializer=be_quiet, maxtasksperchild=1) as pool:
        names = sorted({mutant[0] for mutant in mutants})
        for name, code in zip(names, pool.imap(run_tests, names, chunksize=1), strict=True):
            if code != pytest.ExitCode.OK:
                print(f"{name}: its tests fail without any mutation; repair that first")
                return 1
        killed = 0
        for (module, old, new), outcome in zip(mutants, pool.imap(judge, mutants, chunksize=1), strict=True):
            killed += outcome == "killed"
            print(f"{outcome:<12} {module}: {old!r} -> {new!r}", flush=True)
    print(f"{killed} of {len(mutants)} mutants killed in {time.monotonic() - started:.0f} s")
    return 0 if killed == len(mutants) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
