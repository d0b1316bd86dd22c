"""Define the runs of a train loop to try: their settings, and which of them a loop may refuse."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """The numbers of a run, by the handout's names: keyword arguments of the loop."""

    n_grpo_steps: int = 2
    rollout_batch_size: int = 12
    group_size: int = 4
    train_batch_size: int = 12
    gradient_accumulation_steps: int = 3
    epochs_per_rollout_batch: int = 1
    sampling_temperature: float = 0.7
    sampling_max_tokens: int = 6
    loss_type: str = "reinforce_with_baseline"
    cliprange: float = 0.2
    advantage_eps: float = 1e-6
    use_std_normalization: bool = True
    max_grad_norm: float = 1e6
    seed: int = 0


@dataclass(frozen=True)
class Scenario:
    """A run to try. `open`: handouts leave it open, so a loop may refuse it."""

    about: str
    settings: Settings
    learning_rate: float = 0.3
    open: bool = False
    answers: int = 18  # how many different ground truths there are: fewer than questions, and some share one
    flat: bool = False  # all responses to the first question of a step earn the same reward


SCENARIOS = (
    Scenario("on-policy, 3 questions x 4 responses, 3 micro-batches, temperature 0.7", Settings(), flat=True),
    Scenario(
        "off-policy: 2 epochs, 2 updates each, grpo_clip 0.1, temperature 1.3, no std, max_grad_norm 0.05",
        Settings(
            train_batch_size=6, gradient_accumulation_steps=2, epochs_per_rollout_batch=2, loss_type="grpo_clip",
            cliprange=0.1, sampling_temperature=1.3, use_std_normalization=False, max_grad_norm=0.05, seed=1,
        ),
        learning_rate=8.0,
    ),
    Scenario(
        "advantage_eps 0.5, 6 questions x 2 responses, 2 updates, no micro-batches, some questions of one answer",
        Settings(
            group_size=2, train_batch_size=6, gradient_accumulation_steps=1, advantage_eps=0.5,
            sampling_temperature=0.9, seed=2,
        ),
        answers=5,
    ),
    Scenario(
        "a rollout batch of 16 in train batches of 12, each in 2 micro-batches: 4 responses are left for the last",
        Settings(rollout_batch_size=16, gradient_accumulation_steps=2, n_grpo_steps=1, seed=3),
        open=True,
    ),
    Scenario(
        "a train batch of 8 in 3 micro-batches, which do not divide it",
        Settings(
            rollout_batch_size=8, train_batch_size=8, gradient_accumulation_steps=3, n_grpo_steps=1, seed=4
        ),
        open=True,
    ),
)  # fmt: skip
