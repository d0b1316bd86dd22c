"""The settings of GRPO, and the rules between them."""

from dataclasses import dataclass, field
from typing import ClassVar

from omegaconf import MISSING

from rlreason.config.groups import BaselineConfig, LossConfig, StdNormConfig
from rlreason.config.training import OnlineConfig
from rlreason.objectives.card import Card, objective_card
from rlreason.objectives.rules import check_objective

ON_POLICY_LOSSES = ("no_baseline", "reinforce_with_baseline")  # those without a ratio to the sampling policy


@dataclass
class GRPOConfig(OnlineConfig):
    """Group-relative policy optimisation: sample a group per question, compare, learn, repeat."""

    samples_ahead: ClassVar[bool] = True
    longest_without_evaluation: ClassVar[int | None] = 10  # a rollout step is long, and rewards can collapse in a few

    algorithm: str = "grpo"
    loss: LossConfig = field(default_factory=LossConfig)
    baseline: BaselineConfig = field(default_factory=BaselineConfig)
    std_norm: StdNormConfig = field(default_factory=StdNormConfig)
    advantage_eps: float = 1e-6  # added to what std_norm divides by
    kl_placement: str = "none"  # none | loss | reward; the reference model is the one the run starts from
    kl_estimator: str = "k3"  # k1 | k2 | k3
    kl_coef: float = 0.0
    entropy_coef: float = 0.0  # above 0 rewards entropy
    overlong: str = "none"  # responses cut at max_tokens: none | mask (no loss) | penalty (DAPO's soft one)
    overlong_cache: int | None = None  # tokens over which the penalty grows; None: a fifth of max_tokens
    zero_variance: str = "keep"  # groups of equal rewards: keep | skip
    mismatch: str = "none"  # weights for the gap between engine and trainer: none | truncate | mask
    mismatch_cap: float | None = None  # the largest such weight

    rollout_batch_size: int = MISSING  # responses per step, over all questions
    epochs_per_rollout: int = MISSING  # passes over each rollout batch
    refill_rounds: int = 0  # more rounds of sampling, at most, to replace groups of equal rewards (DAPO)

    @property
    def questions(self) -> int:
        return self.rollout_batch_size // self.group_size

    @property
    def learning_temperature(self) -> float:
        """That of the samples, which are compared with each other."""
        return self.sampling.temperature

    @property
    def updates_per_rollout(self) -> int:
        """Optimizer steps per rollout batch; above 1, all but the first are off-policy."""
        return self.epochs_per_rollout * (self.rollout_batch_size // self.train_batch_size)

    @property
    def old_from_engine(self) -> bool:
        """Sampled ahead for a loss with a ratio: the engine's log-probabilities are what the ratio starts from."""
        return self.rollout.async_level > 0 and self.loss.loss_type not in ON_POLICY_LOSSES

    @property
    def corrects_mismatch(self) -> bool:
        return self.mismatch != "none" or self.old_from_engine

    def describe_batch(self, n_steps: int) -> str:
        updates = self.updates_per_rollout
        steps = f"{updates} optimizer step{'s' if updates > 1 else ''} of {self.train_batch_size}"
        return f"{self.questions} questions x {self.group_size} responses, {steps}"

    def card(self) -> Card:
        return objective_card(self.settings())

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
        if self.group_size < 2 and self.baseline.kind != "none":
            bad.append(
                f"group_size={self.group_size} with baseline={self.baseline.kind}: a response is compared with its "
                "group, and a group of one always gives advantage 0: use group_size=8, or loss=no_baseline"
            )
        if self.refill_rounds and self.baseline.kind == "none":
            bad.append(
                f"refill_rounds={self.refill_rounds} with baseline=none: groups of equal rewards carry credit there "
                "and need no replacement: set it to 0"
            )
        if self.rollout.async_level and self.mismatch == "none" and self.loss.loss_type in ON_POLICY_LOSSES:
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
        return bad or check_objective(self.settings())  # whose rules need sound numbers

    def warnings(self) -> dict[str, str]:
        if self.kl_placement != "reward" or self.std_norm.kind == "none":
            return super().warnings()
        return super().warnings() | {
            "kl_in_reward": (
                f"kl_placement=reward with std_norm={self.std_norm.kind}: in groups of equal rewards the KL term is "
                "divided by its own small spread, whatever kl_coef says; std_norm=none keeps kl_coef's meaning"
            )
        }

    def settings(self) -> dict[str, object]:
        """The objective as plain words and numbers: what the rules check and the card describes."""
        own = ("advantage_eps", "kl_placement", "kl_estimator", "kl_coef", "entropy_coef", "overlong", "zero_variance")
        return {
            "loss_type": self.loss.loss_type,
            **self.loss.numbers(),
            "length_norm": self.length_norm.kind,
            "constant": self.length_norm.constant,
            "baseline": self.baseline.kind,
            "std_norm": self.std_norm.kind,
            **{
                key: getattr(self, key)
                for key in (*own, "mismatch", "mismatch_cap", "epochs_per_rollout", "refill_rounds")
            },
            "on_policy": self.updates_per_rollout == 1,
        }
