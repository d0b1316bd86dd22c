"""The problems of a run, from its `data` settings."""

from functools import partial

from rlreason.config.data import FileData, Stories
from rlreason.config.run import Run
from rlreason.data.files import load_folder_or_hub, subset
from rlreason.data.stories import make_stories
from rlreason.errors import ConfigError
from rlreason.types import Problem


def load_data(run: Run) -> tuple[list[Problem], list[Problem]]:
    data = run.data
    if isinstance(data, Stories):
        make = partial(make_stories, min_events=data.min_events, max_events=data.max_events, max_value=data.max_value)
        return make(data.n_train, seed=0), make(data.n_validation, seed=0, validation=True)
    assert isinstance(data, FileData)
    train, validation = load_folder_or_hub(data.path, data.name)
    if not train or not validation:
        raise ConfigError(
            f"data.path={data.path} has {len(train)} training and {len(validation)} test rows: both need some"
        )
    return subset(train, data.train_limit, run.seed), validation
