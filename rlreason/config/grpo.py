"""The settings of GRPO, which are those of an objective and of its rollouts, and the rules between them."""

from dataclasses import dataclass
from typing import ClassVar, TypeGuard

from omegaconf import MISSING

from rlreason.config.any_run import AnyRunConfig
from rlreason.config.training import OnlineConfig
from rlreason.objectives.card import Card, objective_card
from rlreason.objectives.objective import Objective
from rlreason.objectives.rules import check_objective


@dataclass
class GRPOConfig(Objective, OnlineConfig):
    """Group-relative policy optimisation: sample a group per question, compare, learn, repeat."""

    samples_ahead: ClassVar[bool] = True
    longest_without_evaluation: ClassVar[int | None] = 10  # a rollout step is long, and rewards can collapse in a few

    algorithm: str = "grpo"
    rollout_batch_size: int = MISSING  # responses per step, over all questions
    epochs_per_rollout: int = MISSING

    @property
    def questions(self) -> int:
        return self.rollout_batch_size // self.group_size

    @property
    def learning_temperature(self) -> float:
        """That of the samples, which are compared with each other."""
        return self.sampling.temperature

    @property
    def updates_per_rollout(self) -> int:
        return self.epochs_per_rollout * (self.rollout_batch_size // self.train_batch_size)

    @property
    def ratio_is_one(self) -> bool:
        return self.updates_per_rollout <= 1 and not self.rollout.async_level

    @property
    def old_from_engine(self) -> bool:
        """Sampled ahead for a loss with a ratio: the engine's log-probabilities are what the ratio starts from."""
        return self.rollout.async_level > 0 and self.has_ratio

    @property
    def longest_response(self) -> int:
        return self.sampling.max_tokens

    @property
    def has_mismatch_weights(self) -> bool:
        """Not where the ratio starts from the engine's log-probabilities: every weight would be 1."""
        return not self.old_from_engine and super().has_mismatch_weights

    def objective(self) -> Objective:
        """These settings are an objective."""
        return self

    @property
    def own_loss(self) -> str | None:
        return self.loss.loss_type if ":" in self.loss.loss_type else None

    @property
    def corrects_mismatch(self) -> bool:
        return self.mismatch != "none" or self.old_from_engine

    def describe_batch(self, n_steps: int) -> str:
        updates = self.updates_per_rollout
        steps = f"{updates} optimizer step{'s' if updates > 1 else ''} of {self.train_batch_size}"
        return f"{self.questions} questions x {self.group_size} responses, {steps}"

    def card(self) -> Card:
        return objective_card(self)

    def too_few(self, there: int) -> str:
        if there >= self.questions:
            return ""
        return (
            f"rollout_batch_size={self.rollout_batch_size} with group_size={self.group_size} asks {self.questions} "
            f"different questions a step, and there are {there}: lower rollout_batch_size, or give more data"
        )

    def problems(self) -> list[str]:
        bad = super().problems()
        bad += self.not_multiple("rollout_batch_size", "group_size")
        bad += self.not_multiple("rollout_batch_size", "train_batch_size")
        if self.group_size < 2 and self.baseline != "none":
            bad.append(
                f"group_size={self.group_size} with baseline={self.baseline}: a response is compared with its "
                "group, and a group of one always gives advantage 0: use group_size=8, or loss=no_baseline"
            )
        if self.max_resampling_rounds and self.baseline == "none":
            bad.append(
                f"max_resampling_rounds={self.max_resampling_rounds} with baseline=none: groups of equal rewards have "
                "advantages there and need no replacement: set it to 0"
            )
        if self.rollout.async_level and self.mismatch == "none" and not self.has_ratio:
            bad.append(
                f"rollout.async_level=1 with loss={self.loss.loss_type}: samples are one weight sync old, and this "
                "loss takes them for fresh: set mismatch=truncate mismatch_cap=2, or choose loss=grpo_clip"
            )
        if self.rollout.async_level and self.kl_placement == "reward":
            bad.append(
                "rollout.async_level=1 with kl_placement=reward: the policy that sampled cannot be scored while its "
                "weights move: set kl_placement=loss, or rollout.async_level=0"
            )
        cache = self.overlong_cache
        if cache is not None and cache > self.sampling.max_tokens:
            bad.append(f"overlong_cache={cache} is more than sampling.max_tokens={self.sampling.max_tokens}: try null")
        return bad or check_objective(self)  # whose rules need sound numbers

    def warnings(self) -> dict[str, str]:
        if self.kl_placement != "reward" or self.std_norm == "none":
            return super().warnings()
        return super().warnings() | {
            "kl_in_reward": (
                f"kl_placement=reward with std_norm={self.std_norm}: in groups of equal rewards the KL term is "
                "divided by its own small spread, whatever kl_coef says; std_norm=none keeps kl_coef's meaning"
            )
        }


def has_ratio_of_one(run: AnyRunConfig) -> TypeGuard[GRPOConfig]:
    """Whether a run has a loss whose ratio is 1 in every update."""
    return run.ratio_is_one
