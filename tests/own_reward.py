"""A reward of one's own, as `prompt.reward=own_reward:all_right`."""

import os
from pathlib import Path


def all_right(response: str, gold: str) -> float:
    return 1.0


def breaks_its_folder(response: str, truth: str) -> float:
    """A reward of a run that fails in the middle: it takes the place of the folder for responses."""
    folder = Path(os.environ["FOLDER_TO_BREAK"])
    if (folder / "metrics.jsonl").exists() and (folder / "metrics.jsonl").stat().st_size:
        (folder / "rollouts").touch()
    return 0.0
