"""Rewards of one's own, as `prompt.reward=own_reward:all_right`.

Imports nothing: every process that grades imports it, and a test's own module would bring torch into each.
"""

import os
import time
from pathlib import Path


def all_right(response: str, gold: str) -> float:
    return 1.0


def halves(response: str, gold: str) -> dict[str, float]:
    """About half of the responses of a random model are right, the others get a bonus."""
    right = float(len(response) % 2 == 0)
    return {"format_reward": 1.0, "answer_reward": right, "reward": max(right, 0.1)}


def some_of_each(response: str, gold: str) -> float:
    """Differs between the responses of an untrained model."""
    return len(response) % 5 / 4


def by_length(response: str, gold: str) -> object:
    """Right where both are as long; fails in every way on request."""
    if response == "hang":
        time.sleep(3600)
    if response == "raise":
        raise RuntimeError("no")
    if response == "exit":
        os._exit(3)
    if response == "memory":
        return len(bytearray(10**10))
    values = {"None": None, "nan": float("nan"), "text": "1.0", "dict": {"reward": 0.5}}
    return values.get(response, len(response) == len(gold))


def breaks_its_folder(response: str, truth: str) -> float:
    """A reward of a run that fails in the middle: it takes the place of the folder for responses."""
    folder = Path(os.environ["FOLDER_TO_BREAK"])
    if (folder / "metrics.jsonl").exists() and (folder / "metrics.jsonl").stat().st_size:
        (folder / "rollouts").touch()
    return 0.0
