"""What `python -m rlreason.NAME` does: run a program, forward an old command, or say what to type.

Python imports the package before it looks for the module behind `-m`, so one place covers every module there is.
"""

import os
import sys
from pathlib import Path
from typing import NoReturn

PACKAGE = Path(__file__).resolve().parents[1]
#: Commands of an earlier version, and the words that follow `rlreason` instead. To be removed with the next version.
FORWARDS = {
    "rlreason.inspect": ("inspect",),
    "rlreason.lab": ("inspect", "--gradients"),
    "rlreason.grading.audit": ("inspect", "--regrade"),
    "rlreason.jobs.compare": ("compare",),
    "rlreason.curves": ("curves",),
    "rlreason.main": (),
}
#: Where the name of a module suggests a command: what to type for it. Algorithms need no line here.
MEANT = {
    "evaluation": "python -m rlreason algorithm=evaluate",
    "expert_iteration": "python -m rlreason algorithm=ei",
    "sweeps": "python -m rlreason -m sweep=NAME",
    "plot": "python -m rlreason curves RUN",
}


def place_of_module(argv: list[str], original: list[str]) -> tuple[int, str]:
    """Where `python -m NAME` names its module in the original words, and the flags written together with it.

    >>> place_of_module(["-m", "x"], ["python", "-X", "dev", "-m", "rlreason.curves", "x"])
    (4, '')
    >>> place_of_module(["-m"], ["python", "-Imrlreason.curves"])
    (1, '-Im')
    """
    place = len(original) - len(argv)
    flags, m, _ = original[place].partition("m")
    return place, flags + m if flags.startswith("-") else ""


def runs(name: str, package: Path = PACKAGE) -> bool:
    """Whether `python -m NAME` does something.

    >>> runs("rlreason"), runs("rlreason.setup.ship"), runs("rlreason.trainer")
    (True, True, False)
    """
    path = package.joinpath(*name.split(".")[1:])
    if path.is_dir():
        return (path / "__main__.py").is_file()
    file = path.with_name(path.name + ".py")
    return file.is_file() and (path.name == "__main__" or '\nif __name__ == "__main__":' in file.read_text("utf-8"))


def instead(name: str) -> str:
    """What to type instead of `python -m NAME`, in one line."""
    from rlreason.cli.verbs import VERBS

    last = name.rpartition(".")[2]
    trained = {path.stem for folder in (PACKAGE, PACKAGE.parent) for path in (folder / "conf/algorithm").glob("*.yaml")}
    verbs = {verb.module: f"python -m rlreason {verb.name} {verb.takes}" for verb in VERBS}
    meant = verbs.get(name) or MEANT.get(last)
    meant = meant or (f"python -m rlreason algorithm={last}" if last in trained else "")
    others = ", ".join(other for other in ("python -m rlreason", *verbs.values()) if other != meant)
    return f"{name} is no command: " + (f"type {meant}, or one of {others}" if meant else f"type one of {others}")


def forward_or_refuse() -> None:
    """Called while `python -m` looks for its module: start what an old name is called now, refuse what cannot run.

    An old command is started as a new one of this process, with the same flags of Python: the package is only half
    imported here. What cannot run ends with exit code 2.
    """
    place, flags = place_of_module(sys.argv, sys.orig_argv)
    name = sys.orig_argv[place].removeprefix(flags)
    if name in FORWARDS:
        words = FORWARDS[name]
        now = " ".join((f"python -m {PACKAGE.name}", *words[:1], *["RUN"] * bool(words), *words[1:]))
        print(f"rlreason: python -m {name} is called {now} now", file=sys.stderr, flush=True)
        module = flags + PACKAGE.name
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:place], module, *words, *sys.argv[1:]])
    if name.partition(".")[0] == PACKAGE.name and not runs(name):
        _end(instead(name))


def _end(text: str) -> NoReturn:
    print(f"rlreason: {text}", file=sys.stderr)
    sys.exit(2)
