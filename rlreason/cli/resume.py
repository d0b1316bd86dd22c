"""Find the words that started a run (`resume=RUN`) from its records, and turn settings into overrides."""

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, cast

from hydra import compose
from hydra.core.override_parser.types import Quote, QuotedString
from omegaconf import DictConfig, OmegaConf

from rlreason.cli.aliases import NAMES, SHORT
from rlreason.cli.flags import Request, read
from rlreason.cli.mistakes import in_one_line, options_by_group
from rlreason.config.algorithms import EvaluateConfig
from rlreason.config.groups import engine_here, names_function
from rlreason.config.leaves import typed_word
from rlreason.config.rules import unread_keys
from rlreason.config.run import RunConfig
from rlreason.errors import ConfigError
from rlreason.records.files import PROVENANCE
from rlreason.records.reader import RunFolder, runs_in, setting_in
from rlreason.runtime.text import HIDDEN

PLAIN = re.compile(r"(?!(?:null|true|false|inf|nan)$)[A-Za-z_/][\w./-]*", re.IGNORECASE | re.ASCII)
_COMPOSED = "composed by rlreason from: "  # a flag of a config, followed by its overrides
SHARED = ("dtype", "weights", "attention")  # settings that every model has
GROUPS = ("model", "data", "prompt", "eval.prompt", "eval.data")  # whose options are found by their names


def remember(cfg: DictConfig, words: Sequence[str]) -> None:
    """Make a config remember the overrides that it was composed from, also in copies of it."""
    cfg._set_flag(_COMPOSED + shlex.join(words), True)


def overrides_of(config: DictConfig | RunConfig, anew: Sequence[str] = ()) -> list[str]:
    """Return overrides that compose to these settings: the original ones, and one for each value changed since.

    `anew`: overrides that follow and choose a part of them again, which is left to them. Hydra must be ready to
    compose. `ConfigError` if no overrides can give them.
    """
    now = plain(config)
    flags = config._metadata.flags or {} if isinstance(config, DictConfig) else {}
    known = [flag.removeprefix(_COMPOSED) for flag in flags if flag.startswith(_COMPOSED)]
    keys = set(map(key_of, anew))
    words = without(shlex.split(known[-1]) if known else named_options(now), keys)
    base = plain(composed_settings(words))
    return [*words, *differences(base, replaced(now, base, keys))]


def key_of(word: str) -> str:
    """Return the setting that an override sets, or the place of the option that it chooses.

    >>> key_of("prompt@eval.prompt=r1_zero"), key_of("++data=gsm8k")
    ('eval.prompt', 'data')
    """
    return word.lstrip("+~").partition("=")[0].rpartition("@")[2]


def without(words: Sequence[str], keys: Set[str]) -> list[str]:
    """Return the overrides that set none of these keys, nor anything inside them."""
    return [word for word in words if not any(f"{key_of(word)}.".startswith(f"{key}.") for key in keys)]


def replaced(settings: Mapping[str, Any], base: Mapping[str, Any], keys: Set[str], prefix: str = "") -> dict[str, Any]:
    """Return the settings with those of `keys` as in `base`.

    >>> replaced({"seed": 1, "prompt": {"reward": "mine"}}, {"prompt": {"reward": "r1_zero"}}, {"prompt.reward"})
    {'seed': 1, 'prompt': {'reward': 'r1_zero'}}
    """
    found: dict[str, Any] = {}
    for key, value in settings.items():
        before = base.get(key)
        if f"{prefix}{key}" in keys:
            found[key] = before
        elif isinstance(value, dict) and isinstance(before, dict):
            found[key] = replaced(value, before, keys, f"{prefix}{key}.")
        else:
            found[key] = value
    return found


def composed_settings(words: Sequence[str]) -> DictConfig:
    """Return what these words compose to, unchecked. Hydra must be ready."""
    with in_one_line(words, composing=True):
        return compose("config", list(words))


def plain(config: DictConfig | RunConfig) -> dict[str, Any]:
    """Return settings as nested dicts, without Hydra's own."""
    cfg = OmegaConf.structured(config) if isinstance(config, RunConfig) else config
    found = OmegaConf.to_container(cfg, resolve=True)
    if not isinstance(found, dict) or "algorithm" not in found:
        raise ConfigError("config= holds no settings of a run: give what rlreason.compose(...) returned")
    return {str(key): value for key, value in found.items() if key != "hydra"}


def named_options(settings: Mapping[str, Any]) -> list[str]:
    """Return the options by which settings without remembered overrides name themselves."""
    words, known = [f"algorithm={settings['algorithm']}"], options_by_group()
    for group in GROUPS:
        node: Any = settings
        kind = group.rpartition(".")[2]
        for part in group.split("."):
            node = (node or {}).get(part)
        option = (node or {}).get("name")
        if option in known.get(kind, []) or names_function(option or ""):
            words.append(f"{kind}@{group}={option}" if kind != group else f"{group}={option}")
    loss = (settings.get("loss") or {}).get("loss_type") or ""
    return [*words, f"loss={loss}"] if names_function(loss) else words


def differences(base: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Return an override for each setting of `now` that differs from `base`."""
    for key, value in now.items():
        before = base.get(key)
        if isinstance(value, dict) and isinstance(before, dict) and value.keys() == before.keys():
            yield from differences(before, value, f"{prefix}{key}.")
        elif value != before or type(value) is not type(before):
            yield f"{prefix}{key}={spelled(value)}"


def spelled(value: Any) -> str:
    """Return a value as Hydra can read it back.

    >>> spelled(["</answer>", "a"]), spelled("null"), spelled({"question": "my q"}), spelled(1e-06)
    ("['</answer>',a]", "'null'", "{question:'my q'}", '1e-06')
    """
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{spelled(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return f"[{','.join(map(spelled, value))}]"
    if isinstance(value, str) and not PLAIN.fullmatch(value):
        return QuotedString(value, Quote.single).with_quotes()
    return typed_word(value)


def evaluation_overrides(settings: Mapping[str, Any], model: str, anew: Sequence[str] = ()) -> list[str]:
    """Return overrides of `algorithm=evaluate` on a model folder, with the evaluation of the run that had these
    settings.

    `anew`: overrides that follow and choose a part of them again. Other data are asked in full, whichever part the run
    used for evaluations.
    """
    kept = {field.name for field in fields(EvaluateConfig)} - {"model"}
    keys = set(map(key_of, anew)) - {"model"}
    if "data" in keys:
        keys |= {"eval.data"}
    if keys & {"data", "eval.data"}:
        keys |= {"eval_problems", "eval.problems"}
    if "prompt.reward" in keys or "eval.prompt.reward" in keys:
        keys |= {"eval.reward"}
    chosen = named_options({key: settings[key] for key in kept & settings.keys()} | {"algorithm": "evaluate"})
    words = [*without(chosen, keys), "model=local", f"model.path={spelled(model)}"]
    base = plain(composed_settings(words))
    same = {key: settings[key] for key in base.keys() & settings.keys() - {"algorithm", "model"}}
    trained = settings.get("model") or {}
    same["model"] = base["model"] | {key: trained[key] for key in SHARED if key in trained}
    words += differences(base, replaced(same, base, keys))
    follow = [word for word in anew if not word.lstrip("+").startswith("hydra")]
    run = cast(RunConfig, OmegaConf.to_object(composed_settings([*words, *follow])))
    unread = unread_keys(run)  # such as how long training went on
    return [word for word in words if word.partition("=")[0] not in unread]


WORD = "resume"
RUN_DIR = "hydra.run.dir"
PLACES = (RUN_DIR, "hydra.sweep.dir", "hydra.sweep.subdir", "hydra.mode")  # where a run was, not what it is
SWEEP_STATE = "sweep.json"  # in the folder of a sweep: see sweeps/state.py
PROGRAM = ["python", "-m", "rlreason"]


@dataclass(frozen=True, slots=True)
class Recorded:
    """How a run was started, from its provenance. `sweep`: the name of its sweep."""

    request: Request
    sweep: str | None = None
    notes: list[str] = field(default_factory=list)  # printed before the words are used again

    def with_overrides(self, words: Sequence[str], folder: Path) -> list[str]:
        """Return the words again, for this folder, with these after them: they replace those that set the same.

        `ConfigError` if one of the words contained a secret and is not replaced.
        """
        new = read(words)
        given = {setting_of(word) for word in new.overrides}
        kept = [word for word in self.request.overrides if setting_of(word) not in given]
        for word in kept:
            if HIDDEN in word:
                key = key_of(word)
                raise ConfigError(
                    f"the value of {key} was a secret, which {folder} does not hold: give it again as {key}=VALUE"
                )
        overrides = [*kept, *new.overrides, f"{RUN_DIR}={spelled(str(folder))}"]
        return replace(self.request, flags=self.request.flags | new.flags, overrides=overrides).arguments()


@dataclass(frozen=True, slots=True)
class Expanded:
    """The words of a command line, with `resume=RUN` replaced by the words that it stands for."""

    words: list[str]
    sweep: str | None = None
    notes: list[str] = field(default_factory=list)


def expand_resume(words: Sequence[str]) -> Expanded:
    """Replace `resume=RUN` by the words that started RUN; other words after it take precedence.

    `ConfigError` if RUN cannot be resumed, or if other words name another folder.
    """
    resumes = [word for word in words if _is_resume(word)]
    if not resumes:
        return Expanded(list(words))
    others = [word for word in words if not _is_resume(word)]
    if len(resumes) > 1:
        raise ConfigError(
            f"{' and '.join(resumes)} ask for {len(resumes)} runs to go on: give one, and start the other"
        )
    folder = _folder(resumes[0].partition("=")[2])
    request = read(others)
    if request.multirun:
        raise ConfigError(
            f"{resumes[0]} goes on with one run, and -m starts many: leave -m out; a sweep goes on when its own "
            "command is typed again"
        )
    if place := next((word for word in request.overrides if key_of(word) in PLACES), None):
        raise ConfigError(f"{resumes[0]} goes on in that folder, and {place} names one too: leave {place} out")
    recorded = recorded_start(folder, WORD)
    others += engine_override(folder, [*recorded.request.overrides, *request.overrides])
    return Expanded(recorded.with_overrides(others, folder), recorded.sweep, recorded.notes)


def recorded_start(folder: Path, name: str) -> Recorded:
    """Return how the run in a folder was started; `ConfigError` if that is unknown. `name`: the folder as typed.

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
    request = read(command[len(PROGRAM) :])
    flags = {flag: value for flag, value in request.flags.items() if flag not in ("multirun", "run")}
    overrides = [word for word in request.overrides if not _is_resume(word) and key_of(word) not in PLACES]
    sweep = told.get("sweep")
    place = told.get("directory")
    moved = bool(place) and str(place) != str(Path.cwd())
    notes = [f"{folder} was started in {place}: what its command names by a relative path is looked up here"]
    return Recorded(Request(flags, overrides), str(sweep) if sweep else None, notes if moved else [])


def engine_override(folder: Path, words: Sequence[str]) -> list[str]:
    """Return the override for the engine that `rollout=auto` chose at the start, if it would now choose another."""
    settings = RunFolder(folder).settings
    engine, path = setting_in(settings, "rollout.engine"), setting_in(settings, "model.path")
    if engine is None or engine == engine_here(path) or any(setting_of(word) == "rollout" for word in words):
        return []
    return [f"rollout={engine}"]


def setting_of(word: str) -> str:
    """Return the setting that a word sets, under our name.

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
    """Return the folder that was typed, in quotes or not, with the ~ that a shell leaves after an equals sign."""
    text = value.strip()
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        text = text[1:-1]
    if not text:
        raise ConfigError(f"{WORD}= names no run: give the folder of one, as {WORD}=runs/grpo/2026-01-31_12-00-00")
    path = Path(text)
    try:
        return path if path.exists() else path.expanduser()
    except (OSError, RuntimeError):  # the name is too long; no such user
        return path


def _sweeps_command(folder: Path) -> str:
    """Return the command that started the sweep, in brackets, if it was recorded."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        if command := json.loads((folder / SWEEP_STATE).read_text(encoding="utf-8"))["command"]:
            return f" ({command})"
    return ""
