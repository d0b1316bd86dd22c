"""Do the tests notice? Applies small mistakes to the objectives, one at a time, and runs their tests on each.

    python tests/mutate_objectives.py            all mutants, two at a time
    python tests/mutate_objectives.py losses     those of one module

Every mutant is a copy of the package in a temporary folder; the checkout is never touched. Exit code 1 if the
tests pass on any mutant, or if a mutation no longer fits the code.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from multiprocessing.pool import ThreadPool
from pathlib import Path

import yaml

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
OUTCOMES = {0: "SURVIVED", 1: "killed"}

PLANTED = yaml.safe_load(Path(__file__).with_name("mutants.yaml").read_text("utf-8"))
MUTANTS = [(one["module"], one["old"], one["new"]) for part in PLANTED.values() for one in part]


def judge(mutant: tuple[str, str, str]) -> str:
    """Say what became of one mutant: a copy of the package in which the new text stands for the old one."""
    module, old, new = mutant
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(ROOT / "rlreason", folder / "rlreason", ignore=shutil.ignore_patterns("__pycache__"))
        (folder / "tests").mkdir()
        files = [f"tests/test_objectives_{part}.py" for part in TESTS.get(module, ("terms",))]
        for file in files:
            shutil.copy(ROOT / file, folder / file)
        source = folder / f"rlreason/objectives/{module}.py"
        if source.read_text().count(old) != 1:
            return "DOES NOT FIT"
        source.write_text(source.read_text().replace(old, new))
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": name}
        argv = [sys.executable, "-m", "pytest", *QUICKLY, *files]
        done = subprocess.run(argv, cwd=folder, env=environment, capture_output=True, check=False)
        return OUTCOMES.get(done.returncode, "DOES NOT RUN")


def main(modules: list[str]) -> int:
    """Judge every mutant (of the named modules), print one line each, and return the exit code."""
    mutants = [mutant for mutant in MUTANTS if not modules or mutant[0] in modules]
    survived = 0
    with ThreadPool(2) as pool:
        for (module, old, new), outcome in zip(mutants, pool.imap(judge, mutants), strict=True):
            survived += outcome != "killed"
            print(f"{outcome:<12} {module}: {old!r} -> {new!r}", flush=True)
    print(f"{len(mutants) - survived} of {len(mutants)} mutants killed")
    return int(survived > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
