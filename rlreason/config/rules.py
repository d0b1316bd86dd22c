"""Every rule of a run in one list: sound numbers, the rules between settings, and nothing given that nothing reads."""

from pathlib import Path

from rlreason.config.leaves import not_finite
from rlreason.config.run import Run
from rlreason.config.unread import complaints


def broken_rules(run: Run, conf: Path, of_sweep: bool = False) -> list[str]:
    """Complaints in one line each. `conf` is the folder of option files.

    In a run `of_sweep` a setting may be there for the sake of the other runs, so nobody minds that nothing reads it.

    The kinds of rules go from plain to subtle: of a setting that one kind complains about, the later say no more.
    """
    bad: list[str] = []
    for lines in (not_finite(run), run.problems(), [] if of_sweep else complaints(run, conf).values()):
        named = set(map(_setting, bad))
        bad += [line for line in lines if _setting(line) not in named]
    return bad


def _setting(line: str) -> str:
    """What a complaint is about, by its last name: the rules of the objective know no groups."""
    return line.partition("=")[0].rpartition(".")[2]
