"""When a training run writes a checkpoint, from which the same command goes on."""

from dataclasses import dataclass


@dataclass
class CheckpointConfig:
    """Of every run that trains. A run that a signal stops writes one besides, unless `every` is 0."""

    # Steps between checkpoints; null: as often as costs less than 5% of the run's time; 0: none, and no going on.
    every: int | None = None
    keep: int = 2  # the newest so many stay, and the best; of a finished run the newest and the best
    keep_final: bool = False  # a finished run keeps its optimizer's moments too, for a larger n_steps later
