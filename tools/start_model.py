"""Make the start models shipped with the package: `python tools/start_model.py [OVERRIDES]`, in a checkout.

The overrides are those of the run that the model is for, such as `prompt=r1_zero`; without any, the default run. It
takes as long as the warm start, and writes `rlreason/model/shipped/PROMPT.safetensors` with a description next to it.
Repeat it whenever the model's settings, the stories or the formats change: a test says so.
"""

import json
import shlex
import sys
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir

from rlreason.config.leaves import resource_dir
from rlreason.config.model import TinyModelConfig
from rlreason.config.run import RunConfig, works_on_a_model
from rlreason.config.store import register, typed
from rlreason.data.prepare import read_splits
from rlreason.errors import ConfigError
from rlreason.model.policy import Policy
from rlreason.records.console import Console
from rlreason.runtime.files import write_whole
from rlreason.training.build import make_policy, set_threads
from rlreason.training.warm_start import (
    SHIPPED,
    SUFFIX,
    Recipe,
    Weights,
    checksum,
    copy_weights,
    formats_of,
    lessons_of,
    maker_of,
    recipe_of,
    teach_habits,
    write_weights,
)


def settings_from(words: list[str]) -> RunConfig:
    """Return the settings of a run with these overrides, whose model is made anew."""
    register()
    with initialize_config_dir(str(resource_dir("conf")), version_base="1.3"):
        run = typed(compose("config", [*words, "model.cache=null"]))
    assert works_on_a_model(run)
    return run


def make(run: RunConfig, console: Console) -> tuple[Policy, Recipe, dict[str, Any]]:
    """Return (the model with its habits, its recipe, its maker)."""
    if not isinstance(run.model, TinyModelConfig):
        raise ConfigError(f"model={run.model.name} is not made on the spot: only model=tiny can be shipped")
    train = read_splits(run.data, console.say)[0]
    policy = make_policy(run, train)
    set_threads(run, policy)
    teach_habits(run, policy, train, console)
    return policy, recipe_of(run.model, policy, lessons_of(run, run.model, train)), maker_of(run.model, policy)


def ship(words: list[str], folder: Path = SHIPPED) -> Path:
    """Make a start model, write it with its description, and return the file of its weights."""
    run = settings_from(words)
    policy, recipe, maker = make(run, Console())
    weights: Weights = copy_weights(policy.named_weights())
    name = run.prompt.name if len(formats_of(run)) == 1 else "shared_by_four_prompts"
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}{SUFFIX}"
    write_weights(path, weights)
    description = {
        "made by": shlex.join(["python", "tools/start_model.py", *words]),
        "weights": checksum(weights),
        "recipe": recipe,
        "maker": {key: value for key, value in maker.items() if key != "code"},
    }
    write_whole(path.with_suffix(".json"), json.dumps(description, indent=2) + "\n")
    return path


def main() -> None:
    """Make the model of the command line's overrides; a wrong override is one line and exit code 2."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        print("usage: python tools/start_model.py [KEY=VALUE ...]  (makes a start model that comes with the package)")
        return
    try:
        path = ship(sys.argv[1:])
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    print(f"written: {path}, {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
