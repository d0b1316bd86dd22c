"""The objective of policy-gradient training as one record: how samples are compared, the loss of a token, the average.

GRPO's settings inherit from it; rules, card, advantages, learner and laboratory take it; `dataclasses.replace` makes
variants. `None` means: not set.
"""

from dataclasses import dataclass, make_dataclass
from typing import Any

from rlreason.objectives.losses import LOSSES, REQUIRED, loss_named
from rlreason.settings import LARGE, Range, group, number, text, within

#: Range of every number of any loss, in the order of the losses.
RANGES = {key: limits for loss in LOSSES.values() for key, limits in loss.ranges.items()}
LOSS_NUMBERS = tuple(RANGES)


@dataclass
class ChosenLoss:
    """A loss by name, and both sides of its clip range at once. `LossConfig` adds the numbers of all losses."""

    loss_type: str = text("reinforce_with_baseline", doc="the formula; loss=NAME chooses it together with its numbers")
    cliprange: float | None = number(
        None,
        above=0,
        high=LARGE,
        doc="both sides of the clip range, where cliprange_low or cliprange_high is null",
        only_if="here.reads('cliprange_low') and here.side_is_open",
    )

    def reads(self, name: str) -> bool:
        """Whether the loss has a number of this name."""
        return name in loss_named(self.loss_type).numbers

    @property
    def side_is_open(self) -> bool:
        """Whether a side of the clip range is left to `cliprange`."""
        return None in (getattr(self, "cliprange_low", None), getattr(self, "cliprange_high", None))

    def numbers(self) -> dict[str, float]:
        """Return the loss function's keyword arguments: those it names that are set."""
        numbers = {name: getattr(self, name, None) for name in loss_named(self.loss_type).numbers}
        for side in ("cliprange_low", "cliprange_high"):
            if side in numbers and numbers[side] is None:
                numbers[side] = self.cliprange
        return {name: number for name, number in numbers.items() if number is not None}


def _loss_number(name: str, limits: Range, default: float | None = None) -> tuple[str, Any, Any]:
    """Return the field of a loss's number; what it is for is the cure of its range."""
    return name, float | None, within(limits, default, doc=limits.cure, only_if=f"here.reads('{name}')")


#: The group `loss` of the settings. One schema for every loss, so that a file can set numbers whichever is chosen.
LossConfig: Any = make_dataclass(
    "LossConfig",
    [_loss_number(name, RANGES[name]) for name in LOSS_NUMBERS],
    bases=(ChosenLoss,),
    namespace={"__module__": __name__, "__doc__": "A loss of the policy gradient and its numbers."},
)


def own_loss_config(name: str) -> Any:
    """Return the group `loss` for the user's own loss: its numbers, with the function's defaults."""
    loss = loss_named(name)
    defaults = {key: None if default is REQUIRED else default for key, default in loss.numbers.items()}
    own = [_loss_number(key, loss.ranges[key], default) for key, default in defaults.items()]
    # It is pickled by name: its class is made again from the function when loaded.
    namespace = {
        "__module__": __name__,
        "__reduce__": lambda self: (own_loss_config, (self.loss_type,), vars(self).copy()),
    }
    return make_dataclass("OwnLossConfig", own, bases=(LossConfig,), namespace=namespace)(name)


@dataclass
class LengthNormConfig:
    """What the loss of an optimizer step is averaged over."""

    kind: str = text("masked_mean", doc="the formula; length_norm=NAME chooses it")
    constant: float | None = number(
        None, above=0, doc="tokens to divide by; null: sampling.max_tokens", only_if="here.kind == 'constant'"
    )

    @property
    def divisor(self) -> float | None:
        """The constant, in tokens, if this norm has one that is set."""
        return self.constant if self.kind == "constant" else None


@dataclass
class Objective:
    """Everything that determines the gradient, given the samples.

    >>> from dataclasses import replace
    >>> grpo = Objective(loss=LossConfig("grpo_clip", cliprange=0.2))
    >>> replace(grpo, std_norm="none", length_norm=LengthNormConfig("constant")).baseline
    'mean'
    """

    loss: ChosenLoss = group(LossConfig)
    length_norm: LengthNormConfig = group(LengthNormConfig)
    baseline: str = text("mean", doc="what is subtracted from a response's reward")
    std_norm: str = text("group_std", doc="what the difference is divided by")
    advantage_eps: float = number(1e-6, doc="added to what std_norm divides by", only_if="std_norm != 'none'")
    kl_placement: str = text("none", doc="where the KL term to the model that the run starts from is, if anywhere")
    kl_estimator: str = text(
        "k3",
        doc="k1: x, k2: x^2 / 2, k3: exp(-x) - 1 + x, with x = log pi - log ref of a token",
        only_if="kl_placement != 'none'",
    )
    kl_coef: float = number(
        0.0, doc="the weight of the KL term, above 0 if there is one", only_if="kl_placement != 'none'"
    )
    entropy_coef: float = number(0.0, doc="the weight of an entropy bonus: above 0 rewards entropy")
    overlong: str = text("none", doc="responses cut at sampling.max_tokens: mask: no loss; penalty: DAPO's soft one")
    overlong_cache: int | None = number(
        None,
        low=1,
        doc="last tokens over which the penalty grows; null: a fifth of sampling.max_tokens",
        only_if="overlong == 'penalty'",
    )
    zero_variance: str = text(
        "keep", doc="groups of equal rewards; skip: they carry no loss; length_norm=constant still counts them"
    )
    mismatch: str = text(
        "none",
        doc="importance weights for the gap between engine and trainer; truncate: at most mismatch_cap; mask: 0 "
        "above it",
        only_if="not old_from_engine",
    )
    mismatch_cap: float | None = number(
        None,
        low=1,
        high=LARGE,
        doc="the largest such weight",
        cure="2.0 is usual",
        only_if="not old_from_engine and mismatch != 'none'",
    )
    epochs_per_rollout: int = number(1, low=1, high=LARGE, doc="passes over each rollout batch")
    max_resampling_rounds: int = number(
        0, high=LARGE, doc="most further rounds of sampling for groups of equal rewards (DAPO)"
    )

    @property
    def longest_response(self) -> int | None:
        """Tokens of the longest possible response; None if unknown."""
        return None

    @property
    def updates_per_rollout(self) -> int:
        """Optimizer steps per rollout batch; above 1, all but the first are off-policy."""
        return self.epochs_per_rollout

    @property
    def has_ratio(self) -> bool:
        """Whether the loss divides by the sampling policy, and so allows for samples of an older one."""
        return loss_named(self.loss.loss_type).has_ratio

    @property
    def samples_ahead(self) -> bool:
        """Whether a batch is sampled while the one before it is learned: its policy is an update old."""
        return False

    @property
    def ratio_is_one(self) -> bool:
        """Whether each update learns from samples of the policy that it updates."""
        return self.updates_per_rollout <= 1 and not self.samples_ahead

    @property
    def old_from_engine(self) -> bool:
        """Sampled ahead for a loss with a ratio: the engine's log-probabilities are the old ones."""
        return self.samples_ahead and self.has_ratio

    @property
    def scores_old(self) -> bool:
        """Whether the trainer scores the samples before it learns from them, for ratios."""
        return self.updates_per_rollout > 1 and not self.samples_ahead

    @property
    def has_mismatch_weights(self) -> bool:
        """Whether tokens are weighted for the gap between engine and trainer; `old_from_engine` they would be 1."""
        return self.mismatch != "none" and not self.old_from_engine

    @property
    def kl_coef_of_loss(self) -> float:
        """The weight of the KL term in a token's loss; 0 if KL is in the reward or nowhere."""
        return self.kl_coef if self.kl_placement == "loss" else 0.0

    @property
    def length_constant(self) -> float | None:
        """The divisor of length_norm=constant, in tokens."""
        return self.length_norm.divisor or self.longest_response

    @property
    def overlong_limits(self) -> dict[str, int]:
        """The lengths in tokens for the overlong rule: where the penalty ends, and how long it grows."""
        if self.overlong != "penalty":
            return {}
        longest, cache = self.longest_response, self.overlong_cache
        if longest is None:
            raise ValueError("overlong=penalty: it needs the longest possible response; give longest_response")
        return {"max_length": longest, "cache_length": max(1, longest // 5) if cache is None else cache}
