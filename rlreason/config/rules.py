"""Every rule of a run in one list: sound numbers, the rules between settings, and nothing given that nothing reads."""

from pathlib import Path

from rlreason.config.any_run import AnyRunConfig
from rlreason.config.choices import wrong_words
from rlreason.config.leaves import leaves
from rlreason.config.ranges import out_of_range
from rlreason.config.run import works_on_a_model
from rlreason.config.unread import complaints, of_options


def broken_rules(run: AnyRunConfig, conf: Path, of_sweep: bool = False) -> list[str]:
    """Complaints in one line each. `conf` is the folder of option files.

    In a run `of_sweep` a setting may be there for the sake of the other runs, so nobody minds that nothing reads it.

    The kinds of rules go from plain to subtle: of a setting that one kind complains about, the later say no more.
    """
    bad: list[str] = []
    sizes = out_of_range((leaf.key, leaf.value) for leaf in leaves(run))
    asked = too_many_asked(run, run.problems_there, conf)
    for lines in (sizes, wrong_words(run), run.problems(), asked, [] if of_sweep else complaints(run, conf).values()):
        named = set(map(_setting, bad))
        bad += [line for line in lines if _setting(line) not in named]
    return bad


def too_many_asked(run: AnyRunConfig, there: int | None, conf: Path) -> list[str]:
    """Complaints about more problems than `there` are: what a scale asks for is an upper bound and no mistake."""
    return [
        f"{key}={count} is more than the {there} problems there are to ask: set {key}={there}, or null for all of them"
        for key, count in run.bounds().items()
        if there is not None and count is not None and count > there and count not in of_options(run, key, conf)
    ]


def lowered(run: AnyRunConfig) -> list[str]:
    """A complaint where the last evaluation asks fewer problems than those before it were set to ask.

    Only for who knows that `interim_eval_problems` was typed: a scale's is an upper bound and no mistake.
    """
    if not works_on_a_model(run):
        return []
    asked, last = run.bounds().get("interim_eval_problems"), run.eval.final_problems
    if asked is None or last is None or asked <= last:
        return []
    return [
        f"eval.final_problems={last} is less than interim_eval_problems={asked}, all of which it asks again: raise it, "
        "or lower interim_eval_problems"
    ]


def _setting(line: str) -> str:
    """What a complaint is about, by its last name: the rules of the objective know no groups."""
    return line.partition("=")[0].rpartition(".")[2]
