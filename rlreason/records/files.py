"""What stands in a run folder: its names, and the version of their contents. No other package spells these names.

    config.yaml provenance.json status.json objective.md metrics.jsonl curves.png summary.json log.txt
    rollouts/step_00001.jsonl.gz evals/step_00000.jsonl.gz model/ checkpoints/

A run with a reward, data or a loss of the user's own keeps their sources in `own_functions.txt`.
A job that does not train leaves `responses.jsonl` and `pass_rates.jsonl` instead of the last line, best of N its curves
as `best_of_n.csv` and `best_of_n.png`. `eval.card` adds a `compliance.md`, `profile=true` a `profile.json.gz` and a
`profile.md`. Discovery leaves `calls.jsonl`, `conversation_log.json`, `program.py`, `report.md` and `score.png`.
"""

import re
from pathlib import Path
from typing import NamedTuple

from rlreason.runtime import stacks
from rlreason.runtime.stderr_log import NAME as LOG

HYDRA = ".hydra"  # what Hydra writes before the run begins
CONFIG = "config.yaml"  # every setting with its value
STATUS = "status.json"  # how the run stands or ended
PROVENANCE = "provenance.json"  # commit, command, versions; the version of the folder and the schemas of its settings
OBJECTIVE = "objective.md"
FUNCTIONS = "own_functions.txt"  # sources of the user's own rewards, data and losses
METRICS = "metrics.jsonl"  # grows by a row at a time
SUMMARY = "summary.json"  # written last
CURVES = "curves.png"
PROFILE_TRACE, PROFILE_TABLE = "profile.json.gz", "profile.md"  # of one step, where profile=true
INCIDENTS = "grading_incidents.jsonl"
GROWING = (METRICS, INCIDENTS)  # by a line at a time; a checkpoint knows how long they were
ENGINE_LOG = "vllm.log"
ENGINE_LOGS = (ENGINE_LOG, *(f"vllm_{k}.log" for k in range(2, 17)))  # of as many engines as sample side by side
RANKS_LOG = "ranks.log"  # what the ranks besides the first print, where several train
STACKS = stacks.NAME  # what every process did where one was waited for too long
MODEL = "model"
CHECKPOINTS = "checkpoints"  # a folder for each; see records/checkpoints.py
STATE, TENSORS, MANIFEST = "state.json", "state.safetensors", "manifest.json"  # in a checkpoint, with MODEL
MOMENTS, SPREAD = "moments.safetensors", "moments"  # those of the optimizer: a file, or a folder where ranks have parts
WANDB, TENSORBOARD = "wandb", "tensorboard"  # folders of loggers
LOGGERS = "loggers.json"  # logger -> the name that its service knows the run by
ROLLOUTS, EVALS = "rollouts", "evals"  # folders with a file of responses for each step
RESPONSES = "responses.jsonl"  # of a job that does not train, in the order of the problems
UNFINISHED = "responses.unfinished.jsonl"  # those of an interrupted job, in the order in which they ended
PASS_RATES = "pass_rates.jsonl"
BEST_OF_N_NUMBERS, BEST_OF_N_PICTURE = "best_of_n.csv", "best_of_n.png"
CALLS = "calls.jsonl"  # of a run of discovery: every request and what came of it, as it happens
CONVERSATION, PROGRAM = "conversation_log.json", "program.py"  # the conversation as a whole, the best program so far
REPORT, SCORE_PICTURE = "report.md", "score.png"
CASES = "inspect.md"
COMPLIANCE = "compliance.md"  # of a run that is held to the rules of a leaderboard; its last line is the verdict
#: `STACKS` is open before a run takes its folder, so it is none of them.
CONTENTS = (
    CONFIG, STATUS, PROVENANCE, OBJECTIVE, FUNCTIONS, METRICS, CURVES, PROFILE_TRACE, PROFILE_TABLE, INCIDENTS,
    ROLLOUTS, EVALS, MODEL, f"{MODEL}.partial", CHECKPOINTS, WANDB, TENSORBOARD, LOGGERS, *ENGINE_LOGS, RANKS_LOG, LOG,
    RESPONSES,
    UNFINISHED, PASS_RATES, BEST_OF_N_NUMBERS, BEST_OF_N_PICTURE, CASES, COMPLIANCE, CALLS, CONVERSATION, PROGRAM,
)  # fmt: skip
SET_ASIDE = "broken_off_"  # and a number: a folder in the run folder, for what an earlier run left there

VERSION = 1  # of a folder's contents, in `provenance.json` as "schema_version"; a later one is refused

_STEP_FILE = re.compile(r"step_(\d+)(?:_update_(\d+))?\.jsonl(?:\.gz)?")  # one that a person has unpacked, too


class ResponseFile(NamedTuple):
    """A file of graded responses. `step` is None in a job without steps.

    `update`: the optimizer update behind which it was evaluated, where that was not the last one of a step.
    """

    path: Path
    kind: str  # ROLLOUTS, EVALS or RESPONSES
    step: int | None = None
    update: int | None = None


def step_name(step: int, update: int | None = None) -> str:
    """The name of a step's file of responses.

    >>> step_name(3), step_name(4, update=9)
    ('step_00003.jsonl.gz', 'step_00004_update_00009.jsonl.gz')
    """
    return f"step_{step:05d}{'' if update is None else f'_update_{update:05d}'}.jsonl.gz"


def response_files(folder: Path, kind: str) -> list[ResponseFile]:
    """The files of `rollouts/` or `evals/` in a run folder, in the order of their steps; [] where there are none."""
    found = [
        ResponseFile(path, kind, int(named[1]), int(named[2]) if named[2] else None)
        for path in (folder / kind).glob("step_*.jsonl*")
        if (named := _STEP_FILE.fullmatch(path.name)) and path.is_file()
    ]
    return sorted(found, key=lambda file: (file.step, file.update or -1))
