"""Start a run again by its config, print what differs here, and compare the two when the second has ended.

Words behind RUN replace its settings, as in `rlreason rerun RUN seed=1`. It runs in a new folder, RUN_rerun unless
hydra.run.dir=FOLDER names another. On one machine's processor two runs of the same settings are equal bit for bit, but
for times; a difference is said and is no failure: the exit code is that of the run.
"""

import argparse
import hashlib
import os
import re
import sys
from collections.abc import Mapping
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from typing import Any

from rlreason.cli.check import reading
from rlreason.cli.check_runs import check_start
from rlreason.cli.command import start_run
from rlreason.cli.compose import RUN_DIR, algorithm_of, free_folder, repeated
from rlreason.cli.subcommands import STDOUT
from rlreason.config.store import register
from rlreason.errors import ConfigError
from rlreason.records.console import Console
from rlreason.records.files import EVALS, PACKED, RESPONSES, ROLLOUTS, opened, response_files
from rlreason.records.provenance import MACHINE, code_differs, differences, environment
from rlreason.records.reader import RunFolder
from rlreason.runtime.streams import Answer, Parser
from rlreason.sweeps.design import key_of

#: Metrics that depend on time. Nothing else may differ between two runs of the same settings on the same machine.
CLOCK = re.compile(r"time/|busy/|perf/|memory/|grading/ms_|eval/tokens_per_second")
EARLY = (*MACHINE, "packages", "hardware", "environment")
LATE = ("data", "prompts", "tokenizer", "model", "sampling", "eval_sampling", "engine", "device")


def add_arguments(parser: Parser) -> None:
    """Add RUN, and words that replace some of its own."""
    parser.add_run("the run to start again")
    parser.add_argument("words", metavar="WORD", nargs="*", default=[], help="settings that replace those of RUN")


def main(arguments: argparse.Namespace, console: Console) -> Answer:
    """Run, then compare; the answer has the exit code of the run."""
    then, words = arguments.run, list(arguments.words)
    place = then if then.name else then.absolute()
    now = free_folder(place.with_name(f"{place.name}_rerun"))
    for word in [word for word in words if key_of(word) == RUN_DIR]:
        now = Path(word.partition("=")[2].strip("'\""))
        if now.exists() and (not now.is_dir() or any(now.iterdir())):  # a run there would go on
            raise ConfigError(f"{word}: rerun starts in a new folder: leave it out, or name one that is not there")
    register()
    with reading([word for word in words if key_of(word) != RUN_DIR], console.say, algorithm_of(then)) as request:
        one = repeated(then, request.overrides, console.say, now, name="RUN")
        check_start([one.run], now, console.say)
    told, here = RunFolder(then).provenance, environment()
    before = [*filter(None, [code_differs(told, here)]), *differences(told, here, EARLY)]
    for line in before or [f"nothing differs from what {then} says of code, libraries and machine"]:
        console.say(f"{'then and now: ' * bool(before)}{line}")
    with ExitStack() as stack:
        if arguments.json == STDOUT:  # for the figures alone; a copy: during a run, standard error itself is its log
            sys.stdout.flush()
            screen = stack.enter_context(open(os.dup(2), "w", encoding="utf-8", errors="backslashreplace"))
            stack.enter_context(redirect_stdout(screen))
        code = start_run(one, ["rerun", str(then), *words])
    after = differences(told, RunFolder(now).provenance, LATE)
    equal, said = compared(RunFolder(then), RunFolder(now))
    lines = ["", f"{then} and {now}:", *(f"  then and now: {line}" for line in after), *(f"  {line}" for line in said)]
    figures = {"run": str(then), "rerun": str(now), "status": RunFolder(now).status}
    return Answer("\n".join(lines), figures | {"environment": [*before, *after], "equal": equal, "said": said}, code)


def compared(one: RunFolder, other: RunFolder) -> tuple[dict[str, bool | None], list[str]]:
    """Return of metrics, responses and weights whether both runs agree (None if one has none), and a sentence each."""
    equal, said = dict[str, bool | None](), list[str]()
    for kind, contents in (("metrics", metrics), ("responses", responses), ("weights", weights)):
        then, now = contents(one), contents(other)
        key = next((key for key in then | now if key not in then or key not in now or then[key] != now[key]), None)
        equal[kind] = key is None if then and now else None
        if not then or not now:
            said.append(f"{kind}: one of the two has none")
        elif key is None:
            said.append(f"{kind} are equal ({len(then)} {'numbers' if kind == 'metrics' else 'files'})")
        else:
            said.append(f"{kind} differ: {key} was {then.get(key)} then, {now.get(key)} now")
    return equal, said


def without_clock(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of metrics without those that depend on time.

    >>> without_clock({"train/loss": 0.5, "time/total": 3.0, "grading/ms_p99": 1.0})
    {'train/loss': 0.5}
    """
    return {name: value for name, value in row.items() if not CLOCK.match(name)}


def metrics(run: RunFolder) -> dict[str, Any]:
    """Return the run's metrics by row and name, in order."""
    rows = enumerate(map(without_clock, run.metrics), 1)
    return {f"row {number}'s {name}": value for number, row in rows for name, value in row.items()}


def responses(run: RunFolder) -> dict[str, str]:
    """Return a digest of each file of responses, by its name in the run folder, packed or not."""
    found = [file.path for kind in (ROLLOUTS, EVALS) for file in response_files(run.path, kind)]
    found += [run.path / RESPONSES] if (run.path / RESPONSES).is_file() else []
    return {str(path.relative_to(run.path)).removesuffix(PACKED): _digest(path) for path in found}


def weights(run: RunFolder) -> dict[str, str]:
    """Return a digest of each file of the saved model's weights, by its name."""
    return {path.name: _digest(path) for path in sorted(run.model.glob("*.safetensors"))} if run.model else {}


def _digest(path: Path) -> str:
    with opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:8]  # type: ignore[arg-type]  # of a packed file too
