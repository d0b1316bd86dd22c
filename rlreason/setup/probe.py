"""A function of the user's own is tried before anything is trained with it: that it can be had, and that it judges."""

from collections.abc import Sequence
from dataclasses import replace

from rlreason.config.groups import GradingConfig
from rlreason.config.run import RunConfig
from rlreason.config.uses import judges
from rlreason.grading import Grader
from rlreason.plugins.objects import written_source
from rlreason.setup.graders import reward_name
from rlreason.types import Problem


def own_functions(run: RunConfig) -> list[tuple[str, str]]:
    """(the setting that names it, `module:function`) of every function that is not part of this program."""
    rewards = {"eval.reward": run.eval.reward, "prompt.reward": run.prompt.reward}
    rewards["eval.prompt.reward"] = run.eval.prompt.reward if run.eval.prompt else None
    found = []
    for reward, data in judges(run):
        if ":" in reward:  # which grades data with a verifier too
            found.append((next(f"{key}={reward}" for key, one in rewards.items() if one == reward), reward))
        elif data.verifier is not None:
            key = "data.verifier" if data is run.data else "eval.data.verifier"
            found.append((f"{key}={data.verifier}", reward_name(reward, data)))
    if run.own_scorer is not None:
        found.append((f"scorer={run.own_scorer}", run.own_scorer))
    return list(dict.fromkeys(found))


def own_sources(run: RunConfig) -> dict[str, str]:
    """Setting -> source of every function that a run keeps: what judges, the loss, and what makes the problems."""
    names = own_functions(run)
    names += [(f"{key}={d.function}", d.function) for key, d in run.data_read().items() if hasattr(d, "function")]
    names += [(f"loss={run.own_loss}", run.own_loss)] if run.own_loss else []
    return {setting: written_source(name) for setting, name in names if not name.startswith("rlreason.")}


def judged_by(run: RunConfig, name: str, train: Sequence[Problem], validation: Sequence[Problem]) -> Sequence[Problem]:
    """Problems of the kind that this reward judges: those that are learned from where it judges no evaluation."""
    names = [reward_name(*named) for named in judges(run)]
    learned = run.judges_to_learn and name == names[-1] != names[0]
    return train if learned and train else validation


def unusable(setting: str, name: str, grading: GradingConfig, reference: str | None = None) -> str:
    """Why a function cannot be had or called, tried in a process of the grader's kind; empty where it can.

    With a `reference` answer of the data that it is to judge, it must judge a response, too. Without one it is not
    called: which form of answer it can read is not known.
    """
    with Grader(replace(grading, workers=1), name) as grader:
        if why := grader.wait():
            return f"{setting}: {why}"
        return "" if reference is None else refusal(setting, grader, reference, grading.timeout_s)


def refusal(setting: str, grader: Grader, reference: str, timeout_s: float) -> str:
    """Why a reward of the user's own cannot judge: tried on one response; empty where it can."""
    (grade,) = grader.grade_batch(["probe"], [reference])
    if grade.outcome == "timeout":
        limit = f"grading.timeout_s={timeout_s:g} s"
        return f"{setting} needs more than {limit} for one response: make it faster, or raise it"
    if grade.outcome != "error":
        return ""
    return (
        f"{setting} fails on the response 'probe' and the reference answer {reference[:40]!r}: "
        f"{grader.why_not(grade)}: fix it"
    )
