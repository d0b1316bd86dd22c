"""What `python -m rlreason.NAME` does: run a program, or say what to type.

Python imports the package before it looks for the module behind `-m`, so one place covers every module there is.
"""

import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
#: Where the name of a module suggests a command: what to type for it. Algorithms need no line here.
MEANT = {
    "evaluation": "python -m rlreason algorithm=evaluate",
    "expert_iteration": "python -m rlreason algorithm=ei",
    "sweeps": "python -m rlreason -m sweep=NAME",
    "plot": "python -m rlreason curves RUN",
}


def module_of(argv: list[str], original: list[str]) -> str:
    """The module that `python -m NAME` names in the original words.

    >>> module_of(["-m", "x"], ["python", "-X", "dev", "-m", "rlreason.plot", "x"])
    'rlreason.plot'
    >>> module_of(["-m"], ["python", "-Imrlreason.plot"])
    'rlreason.plot'
    """
    word = original[len(original) - len(argv)]
    return word.partition("m")[2] if word.startswith("-") else word


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


def refuse_wrong_module() -> None:
    """Called while `python -m` looks for its module: what cannot run ends with exit code 2 and what to type."""
    name = module_of(sys.argv, sys.orig_argv)
    if name.partition(".")[0] == PACKAGE.name and not runs(name):
        print(f"rlreason: {instead(name)}", file=sys.stderr)
        sys.exit(2)
