"""`resume=RUN` among the words of a command line: it stands for the words that started RUN, in RUN's folder.

It is a word and no setting: no config holds it, and what a resumed run writes down are the words that it stands for.
"""

import json
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from rlreason.cli.aliases import NAMES, SHORT
from rlreason.cli.as_words import key_of, spelled
from rlreason.cli.flags import Asked, read
from rlreason.config.rollout import engine_here
from rlreason.errors import ConfigError
from rlreason.records.files import PROVENANCE
from rlreason.records.reader import RunFolder, runs_in, setting_in
from rlreason.runtime.secrets import HIDDEN

WORD = "resume"
RUN_DIR = "hydra.run.dir"
PLACES = (RUN_DIR, "hydra.sweep.dir", "hydra.sweep.subdir", "hydra.mode")  # where a run was, not what it is
SWEEP_STATE = "sweep.json"  # in the folder of a sweep: see sweeps/state.py
PROGRAM = ["python", "-m", "rlreason"]


@dataclass(frozen=True, slots=True)
class Recorded:
    """How a run was started, from its provenance. `sweep`: the name of the sweep that it is a run of."""

    asked: Asked
    sweep: str | None = None
    notes: list[str] = field(default_factory=list)  # to be said before the words are used again

    def with_words(self, words: Sequence[str], folder: Path) -> list[str]:
        """The words again, for this folder, with these behind them: they replace what sets the same.

        `ConfigError` where a secret stood in a word that nothing replaces.
        """
        new = read(words)
        given = {setting_of(word) for word in new.overrides}
        kept = [word for word in self.asked.overrides if setting_of(word) not in given]
        for word in kept:
            if HIDDEN in word:
                key = key_of(word)
                raise ConfigError(
                    f"the value of {key} was a secret, which {folder} does not hold: give it again as {key}=VALUE"
                )
        overrides = [*kept, *new.overrides, f"{RUN_DIR}={spelled(str(folder))}"]
        return replace(self.asked, flags=self.asked.flags | new.flags, overrides=overrides).words()


@dataclass(frozen=True, slots=True)
class Continued:
    """The words of a command line with those that `resume=RUN` stood for in its place."""

    words: list[str]
    sweep: str | None = None
    notes: list[str] = field(default_factory=list)


def continued(words: Sequence[str]) -> Continued:
    """Put the words that started RUN in the place of `resume=RUN`; other words behind it win.

    `ConfigError` where RUN is no run that can go on, and beside words that say otherwise where to run.
    """
    resumes = [word for word in words if _is_resume(word)]
    if not resumes:
        return Continued(list(words))
    others = [word for word in words if not _is_resume(word)]
    if len(resumes) > 1:
        raise ConfigError(
            f"{' and '.join(resumes)} ask for {len(resumes)} runs to go on: give one, and start the other"
        )
    folder = _folder(resumes[0].partition("=")[2])
    asked = read(others)
    if asked.multirun:
        raise ConfigError(
            f"{resumes[0]} goes on with one run, and -m starts many: leave -m out; a sweep goes on when its own "
            "command is typed again"
        )
    if place := next((word for word in asked.overrides if key_of(word) in PLACES), None):
        raise ConfigError(f"{resumes[0]} goes on in that folder, and {place} names one too: leave {place} out")
    recorded = recorded_start(folder, WORD)
    others += engine_kept(folder, [*recorded.asked.overrides, *asked.overrides])
    return Continued(recorded.with_words(others, folder), recorded.sweep, recorded.notes)


def recorded_start(folder: Path, name: str) -> Recorded:
    """How the run in a folder was started; `ConfigError` where that is not known. `name`: what the folder is given as.

    The words that said where it runs are left out.
    """
    if not folder.is_dir():
        raise ConfigError(f"{name}={folder} is no folder: give the folder of a run, as printed at its start")
    if inner := runs_in(folder):
        raise ConfigError(
            f"{name}={folder} is a sweep with {len(inner)} runs: type its command again{_sweeps_command(folder)}, or "
            f"give one run, such as {inner[-1]}"
        )
    told = RunFolder(folder).provenance
    try:
        command = shlex.split(str(told.get("command") or ""))
    except ValueError:
        command = []
    if command[: len(PROGRAM)] != PROGRAM:
        raise ConfigError(
            f"{name}={folder} has no {PROVENANCE} that tells its command: type that command with {RUN_DIR}={folder}"
        )
    asked = read(command[len(PROGRAM) :])
    flags = {flag: value for flag, value in asked.flags.items() if flag not in ("multirun", "run")}
    overrides = [word for word in asked.overrides if not _is_resume(word) and key_of(word) not in PLACES]
    sweep = told.get("sweep")
    place = told.get("directory")
    moved = bool(place) and str(place) != str(Path.cwd())
    notes = [f"{folder} was started in {place}: what its command names by a relative path is looked up here"]
    return Recorded(Asked(flags, overrides), str(sweep) if sweep else None, notes if moved else [])


def engine_kept(folder: Path, words: Sequence[str]) -> list[str]:
    """The word for the engine that `rollout=auto` chose where the run began, if it would choose another one here."""
    settings = RunFolder(folder).settings
    engine, path = setting_in(settings, "rollout.engine"), setting_in(settings, "model.path")
    if engine is None or engine == engine_here(path) or any(setting_of(word) == "rollout" for word in words):
        return []
    return [f"rollout={engine}"]


def setting_of(word: str) -> str:
    """What a word sets, under our name for it.

    >>> setting_of("n_grpo_steps=20"), setting_of("eval_problems=8"), setting_of("+loss=gspo")
    ('n_steps', 'eval.problems', 'loss')
    """
    key = key_of(word)
    key = NAMES[key].key if key in NAMES else key
    return SHORT.get(key, key)


def _is_resume(word: str) -> bool:
    """
    >>> _is_resume("resume=runs/a"), _is_resume("+resume=runs/a"), _is_resume("resumed=1"), _is_resume("resume")
    (True, True, False, False)
    """
    key, equals, _ = word.lstrip("+").partition("=")
    return key == WORD and bool(equals)


def _folder(value: str) -> Path:
    """The folder that was typed, in quotes or not, with the ~ that a shell leaves behind an equals sign."""
    text = value.strip()
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        text = text[1:-1]
    if not text:
        raise ConfigError(f"{WORD}= names no run: give the folder of one, as {WORD}=runs/grpo/2026-01-31_12-00-00")
    path = Path(text)
    try:
        return path if path.exists() else path.expanduser()
    except (OSError, RuntimeError):  # a name that is too long; no such user
        return path


def _sweeps_command(folder: Path) -> str:
    """The command that started the sweep, in brackets, where it was written down."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        if command := json.loads((folder / SWEEP_STATE).read_text(encoding="utf-8"))["command"]:
            return f" ({command})"
    return ""
