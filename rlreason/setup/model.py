"""The model of a run, from its `model` settings: loaded, or made on the spot and taught two habits."""

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from rlreason.config.model import PretrainedModel, TinyModel
from rlreason.config.run import Run
from rlreason.console import Console
from rlreason.data.stories import habit_trace
from rlreason.models.tiny import build_model, build_tokenizer
from rlreason.models.warm_start import warm_up
from rlreason.policy import Policy, load_policy, pick_device, pick_dtype
from rlreason.types import Problem

Render = Callable[[str], str]  # a question -> its prompt


def choose_threads(run: Run) -> None:
    """As asked; one for the tiny model, and torch's own choice otherwise.

    Products this small gain a quarter from a second thread, and lose tenfold when another program wants its core.
    """
    if run.threads or isinstance(run.model, TinyModel):
        torch.set_num_threads(run.threads or 1)


def make_policy(run: Run, train: Sequence[Problem], prompt: Render) -> Policy:
    """The model as it is before any training: loaded, or made on the spot with random weights."""
    if isinstance(run.model, PretrainedModel):
        return load_policy(str(Path(run.model.path).expanduser()), run.model.dtype)
    assert isinstance(run.model, TinyModel)
    tiny, device = run.model, pick_device()
    rng = random.Random("tokenizer")  # the same tokenizer for every seed
    tokenizer = build_tokenizer(prompt(p.question) + habit_trace(p, rng, 0.5, 0.0) for p in train[:2000])
    model = build_model(len(tokenizer), tiny.width, tiny.layers, tiny.heads, seed=run.seed)
    return Policy(model, tokenizer, pick_dtype(tiny.dtype, device), device)


def teach_habits(
    run: Run, tiny: TinyModel, policy: Policy, train: Sequence[Problem], prompt: Render, console: Console
) -> None:
    console.say("teaching a new tiny model two habits: mostly hasty answers, sometimes step by step ...")
    settings, tokens = asdict(tiny.warm_start), run.micro_batch_tokens
    warm_up(policy, train, prompt, **settings, micro_batch_tokens=tokens, seed=run.seed, progress=console.progress)
