"""Which modules `python -m` can run; the others say what to type instead of ending without a word.

Python imports the package before it looks for the module behind `-m`, so one place covers every module there is.
"""

import runpy
import sys
from functools import cache
from pathlib import Path
from typing import NoReturn

from rlreason.errors import ConfigError

PACKAGE = Path(__file__).resolve().parents[1]
#: Where the name of a module suggests a command: what to type for it. Algorithms need no line here.
MEANT = {
    "evaluation": "python -m rlreason algorithm=evaluate",
    "expert_iteration": "python -m rlreason algorithm=ei",
    "sweeps": "python -m rlreason -m sweep=NAME",
    "plot": "python -m rlreason.curves RUN",
}


#: Names from before, for one version.
FORWARDS = {
    "rlreason.inspect": "rlreason.analysis.inspect",
    "rlreason.lab": "rlreason.analysis.lab",
    "rlreason.curves": "rlreason.analysis.curves",
    "rlreason.grading.audit": "rlreason.analysis.audit",
    "rlreason.jobs.compare": "rlreason.analysis.compare",
}


def named_by_m(argv: list[str], original: list[str]) -> str:
    """The module that `python -m` is looking for: the last word before the program's own.

    >>> named_by_m(["-m", "x"], ["python", "-X", "dev", "-m", "rlreason.curves", "x"])
    'rlreason.curves'
    >>> named_by_m(["-m"], ["python", "-Imrlreason.curves"])
    'rlreason.curves'
    """
    word = original[len(original) - len(argv)]
    return word.partition("m")[2] if word.startswith("-") else word


def runs(name: str, package: Path = PACKAGE) -> bool:
    """Whether `python -m NAME` does something.

    >>> runs("rlreason"), runs("rlreason.lab"), runs("rlreason.trainer")
    (True, True, False)
    """
    path = package.joinpath(*name.split(".")[1:])
    if path.is_dir():
        return (path / "__main__.py").is_file()
    file = path.with_name(path.name + ".py")
    return file.is_file() and (path.name == "__main__" or '\nif __name__ == "__main__":' in file.read_text("utf-8"))


@cache
def commands(package: Path = PACKAGE) -> list[str]:
    """Every module that a person can run, shortest first."""
    files = [path.relative_to(package).with_suffix("").parts for path in package.rglob("*.py")]
    names = [".".join((package.name, *(part for part in parts if part != "__main__"))) for parts in files]
    # the grader's own process; another name of `rlreason`; for who changes this package, not for who uses it
    inner = {"rlreason.grading.workers.worker", "rlreason.main", "rlreason.setup.ship"}
    return sorted((name for name in set(names) - inner if runs(name, package)), key=lambda name: (len(name), name))


def instead(name: str) -> str:
    """What to type instead of `python -m NAME`, in one line."""
    last = name.rpartition(".")[2]
    trained = {path.stem for folder in (PACKAGE, PACKAGE.parent) for path in (folder / "conf/algorithm").glob("*.yaml")}
    meant = MEANT.get(last) or (f"python -m rlreason algorithm={last}" if last in trained else "")
    others = ", ".join(f"python -m {command}" for command in commands())
    return f"{name} is no command: " + (f"type {meant}, or one of {others}" if meant else f"type one of {others}")


def find_modules_here() -> None:
    """Look for modules in the current folder too, as `python -m` does: for a `module:function` of one's own.

    A script that pip installed looks beside itself instead. Python's own rule against it (`-P`, `-I`, PYTHONSAFEPATH)
    is kept. Processes that grade are told the whole path; those of a sweep are started by `python -m`.
    """
    try:
        here = str(Path.cwd())
    except FileNotFoundError:
        raise ConfigError("the current folder is gone: go to another, or make it again and enter it anew") from None
    if not sys.flags.safe_path and "" not in sys.path and here not in sys.path:
        sys.path.insert(0, here)


def refuse_idle() -> None:
    """Called while `python -m` looks for its module: end with exit code 2 where that one would do nothing."""
    name = named_by_m(sys.argv, sys.orig_argv)
    if name in FORWARDS:
        runpy.run_module(FORWARDS[name], run_name="__main__", alter_sys=True)
        sys.exit()
    if name.partition(".")[0] == PACKAGE.name and not runs(name):
        _end(instead(name))


def _end(text: str) -> NoReturn:
    print(f"rlreason: {text}", file=sys.stderr)
    sys.exit(2)
