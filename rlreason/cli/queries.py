"""Answer what a command line asks of Hydra without a run: help, the composed config, completion, a rerun's config."""

import pickle
import warnings
from argparse import Namespace
from pathlib import Path

from hydra._internal.hydra import Hydra
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.main import _get_rerun_conf
from omegaconf import DictConfig

from rlreason.cli.completion import SCRIPTS
from rlreason.cli.flags import Request
from rlreason.errors import ConfigError


def answer(request: Request) -> None:
    """Print the answer. Hydra must be ready to compose (`flags.composing`)."""
    hydra: Hydra | None = GlobalHydra.instance().hydra
    assert hydra is not None
    flags, name, overrides = request.flags, request.config_name, list(request.overrides)
    resolve = bool(flags.get("resolve"))
    if flags.get("help"):
        hydra.app_help(name, get_args_parser(), Namespace(overrides=overrides, resolve=resolve))
    elif flags.get("hydra_help"):
        own = [word for word in overrides if word.lstrip("+~").startswith("hydra")]  # a run's settings are not shown
        hydra.hydra_help(name, get_args_parser(), Namespace(overrides=own))
    elif kind := flags.get("cfg"):
        hydra.show_cfg(name, overrides, cfg_type=kind, package=flags.get("package"), resolve=resolve)
    elif topic := flags.get("info"):
        hydra.show_info(topic, name, overrides)
    else:
        _complete(hydra, name, overrides)


def _complete(hydra: Hydra, name: str, overrides: list[str]) -> None:
    """Answer Hydra's request for completion by installing this program's own, see `completion.py`."""
    action, _, shell = "".join(overrides).partition("=")
    if action == "install" and shell in SCRIPTS:
        print(SCRIPTS[shell], end="")
        return
    try:
        hydra.shell_completion(name, overrides)
    except ValueError as error:  # an unknown shell, or none
        cause = str(error).splitlines()[0].rstrip(" :")
        raise ConfigError(
            f"--shell-completion {' '.join(overrides)}: {cause}: write -sc install=SHELL with bash, fish or zsh"
        ) from None


def rerun_config(path: str) -> DictConfig:
    """Return the config that Hydra's callback for reruns left in a file, with Hydra's own settings."""
    if not Path(path).is_file():
        raise ConfigError(f"--experimental-rerun={path} is no file: give a config.pickle, or write the overrides again")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that it is experimental
            return _get_rerun_conf(path, [])
    except (pickle.UnpicklingError, AttributeError, EOFError, ImportError, IndexError, ValueError) as error:
        raise ConfigError(
            f"--experimental-rerun={path} holds no pickled config ({error}): give a config.pickle"
        ) from error
