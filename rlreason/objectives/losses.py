"""Per-token policy-gradient losses: from advantages and log-probs to one number per token.

A loss is a function whose keyword arguments are its settings. `LOSSES` has ours by name; `own_loss` loads the user's.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from rlreason.errors import ConfigError
from rlreason.objectives.aggregation import masked_mean
from rlreason.runtime.plugins import NotImportableError, describe_error, load
from rlreason.settings import LARGE, Range

if TYPE_CHECKING:
    from torch import Tensor

    LossAndStats = tuple[Tensor, dict[str, Tensor]]


def masked_log_ratio(log_probs: Tensor, other_log_probs: Tensor, response_mask: Tensor) -> Tensor:
    """log p - log q on response tokens, 0 elsewhere. Each (batch, seq) -> (batch, seq)

    Padding is replaced *before* anything is exponentiated: its values (even inf or NaN) reach neither the result
    nor, as 0 x inf, the gradient.
    """
    return (log_probs - other_log_probs).masked_fill(~response_mask.bool(), 0.0)


RHO = r"\rho_t = \frac{\pi_\theta(y_t)}{\pi_{old}(y_t)},\quad "  # the meaning of \rho_t, before a formula that uses it


REQUIRED = inspect.Parameter.empty


class Formula(NamedTuple):
    """The loss of one token: in plain text, in LaTeX, and what a reader should know of it."""

    plain: str
    latex: str
    note: str


@dataclass(frozen=True)
class Loss:
    """A loss function with its description.

    The function returns the loss of each token, (batch, seq), alone or with statistics of that shape by name. Its
    signature says what it needs: `old_log_probs` and `response_mask` are parameters if it uses them, and each
    number of its own is a keyword-only parameter, which becomes the setting `loss.NUMBER`. A number with a default
    may be left out.
    """

    function: Callable[..., LossAndStats | Tensor]
    formula: Callable[..., Formula]  # of the numbers, by name
    ranges: Mapping[str, Range] = field(default_factory=dict)  # of each number
    problems: Callable[..., list[str]] = lambda **numbers: []  # rules between numbers, one line each
    published: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # title -> numbers, and axes unlike GRPO's
    notes: tuple[str, ...] = ()  # how libraries or papers of that name differ

    @cached_property
    def _parameters(self) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(self.function).parameters

    @cached_property
    def numbers(self) -> dict[str, Any]:
        """The names of its numbers with their defaults; `REQUIRED` where there is none."""
        return {p.name: p.default for p in self._parameters.values() if p.kind is p.KEYWORD_ONLY}

    @cached_property
    def has_ratio(self) -> bool:
        """Whether it uses the old log-probabilities, and so allows for older samples."""
        return "old_log_probs" in self._parameters

    def __call__(
        self,
        advantages: Tensor,
        policy_log_probs: Tensor,
        old_log_probs: Tensor | None,
        response_mask: Tensor | None,
        **numbers: float,
    ) -> LossAndStats:
        """Return (loss, stats) per token, each (batch, seq); the function gets only the arguments that it names."""
        more = {"old_log_probs": old_log_probs, "response_mask": response_mask}
        read = {name: value for name, value in more.items() if name in self._parameters}
        found = self.function(advantages, policy_log_probs, **read, **numbers)
        loss, stats = found if isinstance(found, tuple) else (found, {})
        return loss, {name: stat.detach().to(loss.dtype) for name, stat in stats.items()}


LOSSES: dict[str, Loss] = {}


def policy_gradient(advantages: Tensor, policy_log_probs: Tensor) -> LossAndStats:
    """-A log pi: REINFORCE (Williams 1992), without any ratio. `A` may be a raw reward or an advantage."""
    return -advantages * policy_log_probs, {}


def _plain_formula() -> Formula:
    return Formula("l = -A log pi", r"\ell_t = -A \log \pi_\theta(y_t)", "no ratio, no clip")


# One formula under two names, for A as a raw reward or as an advantage.
LOSSES["no_baseline"] = Loss(
    policy_gradient,
    _plain_formula,
    notes=("RFT: equal to fine-tuning on correct samples only for rewards of 0 and 1; a negative reward pushes away.",),
)
LOSSES["reinforce_with_baseline"] = Loss(policy_gradient, _plain_formula)


def _clipped_surrogate(
    ratio: Tensor, advantages: Tensor, cliprange_low: float, cliprange_high: float, dual_clip: float | None
) -> LossAndStats:
    """-min(rho A, clip(rho, 1 - low, 1 + high) A), and at most -dual_clip A where A < 0. (batch, seq)

    `clipped` is 1 where the bound is the smaller one, that is where the token has lost its gradient.
    """
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - cliprange_low, 1 + cliprange_high) * advantages
    surrogate = unclipped.minimum(clipped)
    lost = clipped < unclipped
    stats = {"clipped_low": lost & (ratio < 1), "clipped_high": lost & (ratio > 1)}
    if dual_clip is not None:
        floor = (dual_clip * advantages).where(advantages < 0, -math.inf)
        stats["dual_clipped"] = surrogate < floor
        surrogate = surrogate.maximum(floor)
        lost = lost | stats["dual_clipped"]
    return -surrogate, {"ratio": ratio, "clipped": lost, **stats}


def _clipped_formula(
    ratio: tuple[str, str, str, str], cliprange_low: float, cliprange_high: float, dual_clip: float | None = None
) -> Formula:
    """`ratio`: its name in plain text and in LaTeX, and its definition in both."""
    name, symbol, meaning, define = ratio
    low, high = f"{1 - cliprange_low:g}", f"{1 + cliprange_high:g}"
    plain = f"min({name} A, clip({name}, {low}, {high}) A)"
    latex = rf"\min\left({symbol} A,\ \operatorname{{clip}}({symbol}, {low}, {high}) A\right)"
    note = f"cliprange_low={cliprange_low:g}, cliprange_high={cliprange_high:g}"
    if dual_clip is not None:
        bound = f"{dual_clip:g}"
        plain = f"max({plain}, {bound} A if A < 0)"
        latex = rf"\max\left({latex},\ {bound} A \text{{ if }} A < 0\right)"
        note += f", dual clip {bound}"
    return Formula(f"l = -{plain}, {meaning}", f"{define}\\ell_t = -{latex}", note)


CLIP_RANGES = {
    "cliprange_low": Range(0, 1, "the ratio is kept above 1 - cliprange_low: try 0.2", above=True),
    "cliprange_high": Range(0, LARGE, "the ratio is kept below 1 + cliprange_high: try 0.2", above=True),
}


def grpo_clip(
    advantages: Tensor,
    policy_log_probs: Tensor,
    old_log_probs: Tensor,
    response_mask: Tensor,
    *,
    cliprange_low: float,
    cliprange_high: float,
    dual_clip: float | None = None,
) -> LossAndStats:
    """-min(rho A, clip(rho, 1 - low, 1 + high) A) per token. PPO, arXiv 1707.06347; GRPO, arXiv 2402.03300.

    low < high is DAPO's clip-higher (arXiv 2503.14476). `dual_clip` c > 1 + high bounds the loss by -c A
    where A < 0 (arXiv 1912.09729); None leaves it unbounded.
    """
    ratio = masked_log_ratio(policy_log_probs, old_log_probs, response_mask).exp()
    return _clipped_surrogate(ratio, advantages, cliprange_low, cliprange_high, dual_clip)


def _dual_clip_problems(cliprange_low: float, cliprange_high: float, dual_clip: float | None = None) -> list[str]:
    least = 1 + cliprange_high
    if dual_clip is None or dual_clip > least:
        return []
    return [f"dual_clip={dual_clip}: it must lie above 1 + cliprange_high={least}; 3.0 is usual"]


LOSSES["grpo_clip"] = Loss(
    grpo_clip,
    lambda **numbers: _clipped_formula(("rho", r"\rho_t", "rho = pi / pi_old", RHO), **numbers),
    CLIP_RANGES | {"dual_clip": Range(1, LARGE, "it bounds the loss by -dual_clip A where A < 0: try 3.0", above=True)},
    _dual_clip_problems,
)


def grpo_no_clip(
    advantages: Tensor, policy_log_probs: Tensor, old_log_probs: Tensor, response_mask: Tensor
) -> LossAndStats:
    """-rho A: the importance-weighted policy gradient without a trust region (the handout's GRPO-No-Clip)."""
    ratio = masked_log_ratio(policy_log_probs, old_log_probs, response_mask).exp()
    return -ratio * advantages, {"ratio": ratio}


LOSSES["grpo_no_clip"] = Loss(
    grpo_no_clip, lambda: Formula("l = -rho A, rho = pi / pi_old", RHO + r"\ell_t = -\rho_t A", "no clip")
)


def gspo(
    advantages: Tensor,
    policy_log_probs: Tensor,
    old_log_probs: Tensor,
    response_mask: Tensor,
    *,
    cliprange_low: float,
    cliprange_high: float,
) -> LossAndStats:
    """-min(s A, clip(s, 1 - low, 1 + high) A) with one ratio per sequence, s = exp(mean over t of log rho_t).

    GSPO, arXiv 2507.18071. The mean runs over response tokens only; s keeps its gradient and stands at every
    position of the row, so that `masked_mean` gives the paper's objective.
    """
    log_ratio = masked_log_ratio(policy_log_probs, old_log_probs, response_mask)
    ratio = masked_mean(log_ratio, response_mask, dim=-1, empty="zero").exp()
    return _clipped_surrogate(
        ratio[:, None].expand_as(log_ratio), advantages, cliprange_low, cliprange_high, dual_clip=None
    )


_S = r"s = \exp\Big(\frac{1}{|y|}\sum_t \log \frac{\pi_\theta(y_t)}{\pi_{old}(y_t)}\Big),\quad "
LOSSES["gspo"] = Loss(
    gspo,
    lambda **numbers: _clipped_formula(
        ("s", "s", "s = exp(mean over response tokens of log(pi / pi_old))", _S), **numbers
    ),
    CLIP_RANGES,
    notes=(
        "GSPO: the paper clips at 3e-4 below and 4e-4 above, CS336 at 3e-4 on both sides; token-level "
        "ranges such as 0.2 practically never act on a mean over tokens.",
    ),
)


def cispo(
    advantages: Tensor, policy_log_probs: Tensor, old_log_probs: Tensor, response_mask: Tensor, *, ratio_cap: float
) -> LossAndStats:
    """-sg(min(rho, cap)) A log pi: the weight is capped, the gradient of every token stays.

    CISPO, arXiv 2506.13585. `ratio_cap` is the largest weight itself, not a distance from 1.
    """
    ratio = masked_log_ratio(policy_log_probs, old_log_probs, response_mask).exp().detach()
    stats = {"ratio": ratio, "clipped": ratio > ratio_cap}
    return -ratio.clamp(max=ratio_cap) * advantages * policy_log_probs, stats


LOSSES["cispo"] = Loss(
    cispo,
    lambda ratio_cap: Formula(
        f"l = -sg(min(rho, {ratio_cap:g})) A log pi, rho = pi / pi_old",
        RHO + rf"\ell_t = -\operatorname{{sg}}\left[\min(\rho_t, {ratio_cap:g})\right] A \log \pi_\theta(y_t)",
        f"absolute cap {ratio_cap:g}, no gradient through the weight",
    ),
    {"ratio_cap": Range(1, LARGE, "it is the largest weight: try 5.0")},
    notes=(
        "CISPO: ratio_cap is the largest weight itself, as in TRL; where a library asks for an eps, "
        "its cap is 1 + eps.",
    ),
)


def sapo(
    advantages: Tensor,
    policy_log_probs: Tensor,
    old_log_probs: Tensor,
    response_mask: Tensor,
    *,
    tau_pos: float,
    tau_neg: float,
) -> LossAndStats:
    """-f(rho) A with the soft gate f(rho) = 4 / tau * sigmoid(tau (rho - 1)) in place of a clip. (batch, seq)

    tau is `tau_pos` where A > 0, else `tau_neg`: a larger one lets tokens of bad responses fade sooner. At rho = 1 the
    gradient is that of -rho A, whatever tau is. SAPO, arXiv 2511.20347.
    """
    # The gate is flat long before exp(80). Past float32's largest ratio its slope of 0 would be multiplied by inf: NaN.
    ratio = masked_log_ratio(policy_log_probs, old_log_probs, response_mask).clamp(max=80).exp()
    tau = ratio.new_full((), tau_pos).where(advantages > 0, tau_neg)
    return -4 / tau * (tau * (ratio - 1)).sigmoid() * advantages, {"ratio": ratio}


LOSSES["sapo"] = Loss(
    sapo,
    lambda tau_pos, tau_neg: Formula(
        f"l = -4 / tau sigmoid(tau (rho - 1)) A, tau = {tau_pos:g} if A > 0 else {tau_neg:g}, rho = pi / pi_old",
        RHO + r"\ell_t = -\frac{4}{\tau} \sigma\left(\tau (\rho_t - 1)\right) A,\quad "
        rf"\tau = {tau_pos:g} \text{{ if }} A > 0 \text{{ else }} {tau_neg:g}",
        f"soft gate, tau_pos={tau_pos:g}, tau_neg={tau_neg:g}",
    ),
    {
        "tau_pos": Range(1e-3, 1e3, "it is the gate's steepness where A > 0: try 1.0"),
        "tau_neg": Range(1e-3, 1e3, "it is the gate's steepness where A is not above 0: try 1.05"),
    },
    published={"SAPO (arXiv 2511.20347)": {"tau_pos": 1.0, "tau_neg": 1.05}},
)


MAY_READ = ("old_log_probs", "response_mask")
FINITE = Range(-1e30, 1e30, "give a number that float32 can hold")


def loss_named(name: str) -> Loss:
    """Return a loss of the table, or the user's own `module:function`. `ConfigError` if there is no such loss."""
    if name in LOSSES:
        return LOSSES[name]
    try:
        found = load(name)
    except NotImportableError as error:
        raise ConfigError(f"loss={name}: {error}") from None
    return found if isinstance(found, Loss) else of_function(name, found)


def of_function(name: str, function: Callable[..., Any]) -> Loss:
    """Wrap a function as a loss, with unrestricted numbers; its formula is its docstring's first line."""
    parameters = list(inspect.signature(function).parameters.values())
    read = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    numbers = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    if len(read) < 2 or set(read[2:]).difference(MAY_READ) or len(read) + len(numbers) < len(parameters):
        raise ConfigError(
            f"loss={name}: it takes ({', '.join(map(str, parameters))}), and a loss takes (advantages, "
            f"policy_log_probs), {' and '.join(MAY_READ)} where it reads them, and its numbers after a *: change its "
            "parameters"
        )
    for p in numbers:
        if p.default is not p.empty and (isinstance(p.default, bool) or not isinstance(p.default, int | float | None)):
            raise ConfigError(f"loss={name}: the default of {p.name} is {p.default!r:.40}: a loss has numbers alone")

    def formula(**given: float) -> Formula:
        first = (inspect.getdoc(function) or "a function without a docstring").partition("\n")[0]
        values = "".join(f"{key}={number:g}, " for key, number in given.items())
        return Formula(first.rstrip("."), "", f"{values}a function of your own: {name}")

    return Loss(function, formula, {p.name: FINITE for p in numbers})


def broken_contract(name: str, numbers: Mapping[str, float]) -> str:
    """Say in one line why a loss cannot be trained with, tried on a small batch with padding; "" if it can."""
    prefix = f"loss={name}"
    try:
        return next((f"{prefix} {why}" for why in _faults(loss_named(name), numbers)), "")
    except ConfigError:
        raise
    except Exception as error:  # whatever the user's function raises
        return f"{prefix} fails on a batch of 3 responses: {describe_error(error)}: fix it"


def _faults(loss: Loss, numbers: Mapping[str, float]) -> Iterator[str]:
    import torch

    random = torch.Generator().manual_seed(0)
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 1, 1, 0, 0], [0, 0, 1, 1, 1]], dtype=torch.bool)
    policy, old, other = (-0.05 - 3 * torch.rand(3, 5, generator=random) for _ in range(3))
    advantages = torch.tensor([[1.0], [-0.5], [0.25]])

    def tried(policy: Tensor, rows: slice = slice(None), old: Tensor = old) -> tuple[Any, Any, Tensor]:
        """(loss, stats, log-probabilities whose gradient is asked for) of some responses of the batch."""
        policy = policy[rows].clone().requires_grad_()
        return *loss(advantages[rows], policy, old[rows], mask[rows], **numbers), policy

    value, stats, variable = tried(policy)
    for what, found in {"the loss": value, **stats}.items():
        if not isinstance(found, torch.Tensor) or found.shape != mask.shape:
            shape = tuple(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
            yield f"returns {what} as {shape} for log-probabilities of shape (3, 5): give a value of each token"
    gradient = torch.autograd.grad(value[mask].sum(), variable)[0] if value.requires_grad else torch.zeros(3, 5)
    if not value[mask].isfinite().all() or not gradient.isfinite().all():
        yield "or its gradient is not finite where log-probabilities lie between -3 and 0: mask before exp and division"
    if not gradient.any():
        yield "has no gradient: compute it from policy_log_probs, not detached"
    moved, *_ = tried(policy.where(mask, other), old=old.where(mask, other + 0.5))
    if gradient[~mask].any() or not torch.allclose(moved[mask], value[mask], atol=1e-5):
        yield "reads what stands where response_mask is false: leave these positions out (masked_mean, torch.where)"
    alone, *_ = tried(policy, slice(0, 1))
    if not torch.allclose(alone[mask[:1]], value[:1][mask[:1]], atol=1e-5):
        yield (
            "gives a response another loss when other responses stand next to it, and a micro-batch is only a part of "
            "the step: compute each response from its own row"
        )
