"""Run from Python what the command line runs, in this process, and return values to work with."""

import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from hydra.core.utils import JobRuntime
from omegaconf import DictConfig, OmegaConf
from omegaconf.basecontainer import BaseContainer

from rlreason.api.runs import Run
from rlreason.cli.check import check_command_line, reading
from rlreason.cli.compose import RESUME, RUN_DIR, changed_run, check_start, composed, given_again
from rlreason.cli.flags import OneRun, composing, read
from rlreason.config.run import RunConfig, works_on_a_model
from rlreason.config.store import SEARCHED, register
from rlreason.errors import ConfigError
from rlreason.main import run_job
from rlreason.records.console import Console
from rlreason.runtime.files import free_folder
from rlreason.runtime.machine import SWEEP_VARIABLE, divide_memory_finely, place_of, process_state_kept
from rlreason.runtime.plugins import as_settings
from rlreason.runtime.signals import stoppable
from rlreason.runtime.text import redacted
from rlreason.sweeps.design import key_of

#: The settings of Hydra that do not change the whole process: where a run writes, and where options are found.
HYDRA_SETTINGS = ("hydra.run.dir", "hydra.job.name", "hydra.searchpath")
SHARED = ("dtype", "weights", "attention")  # settings that every model has
#: Hydra's objects that a run has for itself.
_RENEWED = (ConfigStore, GlobalHydra, HydraConfig, JobRuntime)
_OF_HYDRA = ("hydra", "_dummy_empty_config_.yaml")  # Hydra's own entries in its store of configs
_running = threading.Lock()  # held by the one run of this process


def train(
    *overrides: str,
    config: DictConfig | RunConfig | None = None,
    reward: Callable[..., Any] | str | None = None,
    loss: Callable[..., Any] | str | None = None,
    data: Any = None,
    quiet: bool = False,
) -> Run:
    """Start the run of these overrides, and return it when it has ended.

        run = train("loss=grpo_clip", "n_steps=20", "hydra.run.dir=runs/clip")
        run = train("resume=runs/clip", "n_steps=40")  # resumes it, in its folder

    `config`: what `compose` returned, changed or not; `overrides` then come on top. `reward`, `loss`, `data`: of your
    own, as functions. `quiet`: print nothing. A run that diverged is returned too: see its `status`.

    Raises `ConfigError` where the overrides are refused, `DataError`, `EngineError` or `ResourceError` where the run
    cannot go on, and KeyboardInterrupt where it was interrupted, after its records were finished. SIGTERM ends the
    whole process, as it does without a run.
    """
    return _start(config, overrides, {"reward": reward, "loss": loss, "data": data}, quiet)


def evaluate(
    *overrides: str | Run,
    config: DictConfig | RunConfig | None = None,
    reward: Callable[..., Any] | str | None = None,
    data: Any = None,
    quiet: bool = False,
) -> Run:
    """Measure a model as it is: `train` with `algorithm=evaluate`.

    evaluate("model=local", "model.path=DIR", "data=gsm8k", "data.path=DIR", "eval_problems=200")
    evaluate(run, "eval.samples=4")  # a run's saved model, evaluated as at the end of training
    """
    objects = {"reward": reward, "data": data}
    if overrides and isinstance(overrides[0], Run):
        return _start(overrides[0], overrides[1:], objects, quiet)
    return _start(config, ["algorithm=evaluate", *overrides], objects, quiet)


def compose(*overrides: str) -> DictConfig:
    """Return the settings of the run of these overrides, to be read or changed, and given to `train(config=...)`.

    Types and names are checked here, the command line's rules when the run starts. Every setting has a value here, also
    `train_batch_size`, which overrides take from `rollout_batch_size`: change both.
    """
    with own_hydra():
        request = check_command_line(["--cfg=job", *_checked_overrides(overrides)])
        if request.one is not None:  # of an earlier run
            return request.one.config
        with composing(request):
            return composed(request.overrides, request.config_name, with_hydra=False)


@contextmanager
def own_hydra() -> Iterator[None]:
    """Give Hydra our schemas and resolvers for the block, and no one else's configs."""
    Plugins.instance()  # before the copy: keep what the modules of plug-ins store on import
    stored = ConfigStore.instance().repo
    theirs, resolvers, searched = Singleton._instances, BaseContainer._resolvers, list(SEARCHED)
    Singleton._instances = {kind: one for kind, one in theirs.items() if kind not in _RENEWED}
    BaseContainer._resolvers = dict(resolvers)
    try:
        ConfigStore.instance().repo |= {name: stored[name] for name in _OF_HYDRA}
        register()
        yield
    finally:
        Singleton._instances, BaseContainer._resolvers = theirs, resolvers
        SEARCHED[:] = searched


def _start(
    base: Run | DictConfig | RunConfig | None, overrides: Sequence[object], objects: dict[str, Any], quiet: bool
) -> Run:
    """Start the run of these overrides, or the evaluation of a run; return it when it has ended.

    `base`: the settings that the overrides change, or the run that is evaluated. `objects`: the reward, loss and data
    that were given as Python objects; see `train`.
    """
    typed = _checked_overrides(overrides)
    if place_of():
        raise ConfigError(
            "torchrun has started this script several times: run it once, and say gpus=2, which starts the other ranks"
        )
    with ExitStack() as stack:
        if not _running.acquire(blocking=False):  # a run sets the state of the whole process
            raise ConfigError("another run of this process is under way: start a second one by python -m rlreason")
        stack.callback(_running.release)
        own = stack.enter_context(as_settings(**objects))
        console = Console(stack.enter_context(open(os.devnull, "w")) if quiet else None)
        if isinstance(base, Run) and (base.config.get("eval") or {}).get("prompt"):  # keep that prompt
            own = [word.replace("prompt.reward=", "eval.reward=", 1) for word in own]
        words = [*own, *typed]
        with own_hydra():
            one = _one_run(base, words, console.say)
        run, folder = one.run, one.folder.absolute()
        if not works_on_a_model(run):
            raise ConfigError(f"algorithm={run.algorithm} is started by python -m rlreason: leave it out here")
        if not any(key_of(word) in (RESUME, RUN_DIR) for word in typed):
            folder = free_folder(folder)  # another run may have begun in the same second
        if base is not None:  # its words alone would be another run
            words = ["rerun", str(folder)]
        stack.enter_context(process_state_kept())
        if one.sweep:  # loggers group it as in the sweep
            os.environ.setdefault(SWEEP_VARIABLE, one.sweep)
        divide_memory_finely()
        stack.enter_context(stoppable(in_script=True))
        run_job(run, folder, redacted(OmegaConf.to_yaml(one.config)), words, console)
    return Run(folder)


def _one_run(base: Run | DictConfig | RunConfig | None, overrides: list[str], note: Callable[[str], object]) -> OneRun:
    """Return the run of these overrides, on top of what is given to begin with; `ConfigError` if it cannot start."""
    if base is None:
        request = check_command_line(overrides, note)
        assert request.one is not None
        return request.one
    with reading(read(overrides), note) as request:
        if isinstance(base, Run):
            if base.model is None:
                raise ConfigError(f"{base.folder} holds no saved model: give one of save_model=true, or model.path=DIR")
            settings, problems = base.config, base.summary.get("eval_problems")
            if problems and settings.get("eval_problems"):  # a scale's number may exceed those there were
                settings["eval_problems"] = min(problems, settings["eval_problems"])
            given = {key_of(word) for word in request.overrides if not given_again(settings, word)}
            settings = evaluation_settings(settings, base.model.absolute(), given)
        else:
            settings = plain(base, resolve=False)
        one = changed_run(settings, request.overrides)
        check_start([one.run], one.folder, note)
        return one


def evaluation_settings(settings: Mapping[str, Any], model: Path, anew: Collection[str]) -> dict[str, Any]:
    """Return the settings of `algorithm=evaluate` on a model folder, as the run with these settings was evaluated.

    `anew`: what overrides will choose again. Other data are asked in full, whichever part the run used. Hydra must be
    ready to compose.
    """
    usual = plain(composed(["algorithm=evaluate", "model=local"], "config", with_hydra=False))
    found = usual | {key: settings[key] for key in usual.keys() & settings.keys() - {"algorithm", "model", *anew}}
    trained = settings.get("model") or {}
    found["model"] |= {"path": str(model)} | {key: trained[key] for key in SHARED if key in trained}
    evaluated = dict(found["eval"])
    if "data" in anew:
        evaluated["data"] = None
    if {"data", "eval.data"} & set(anew):
        found["eval_problems"], evaluated["problems"] = usual["eval_problems"], None
    if {"prompt.reward", "eval.prompt.reward"} & set(anew):
        evaluated["reward"] = None
    return found | {"eval": evaluated}


def plain(config: object, resolve: bool = True) -> dict[str, Any]:
    """Return settings as nested dicts, without Hydra's own; `resolve=False` leaves what follows from others a text."""
    if not isinstance(config, DictConfig | RunConfig):
        kind = type(config).__name__
        raise ConfigError(f"config= is of type {kind}: give what rlreason.compose(...) returned, and words as texts")
    found: Any = OmegaConf.to_container(OmegaConf.structured(config), resolve=resolve)
    if "algorithm" not in found:
        raise ConfigError("config= holds no settings of a run: give what rlreason.compose(...) returned")
    return dict(found)


def _checked_overrides(overrides: Sequence[object]) -> list[str]:
    """Return the overrides as they are; `ConfigError` unless they request one run in this process."""
    texts = list[str]()
    for word in overrides:
        if not isinstance(word, str):
            raise ConfigError(f"{word!r} is no override: write it as a text, 'key=value'")
        if word.startswith("-"):
            raise ConfigError(f"{word} is a flag of the command line: leave it out here")
        if (key := word.lstrip("+~").partition("=")[0]).startswith("hydra") and key not in HYDRA_SETTINGS:
            raise ConfigError(f"{word} would change the whole process: leave it out, or start it by python -m rlreason")
        texts.append(word)
    return texts
