"""Per-token policy-gradient losses: from advantages and log-probs to one number per token.

Each loss is a pure function and, below it, its entry in `LOSSES`, from which settings, range checks, rules, card and
laboratory follow. A new loss is these two and an option file `conf/loss/NAME.yaml`; CONTRIBUTING.md has an example.
A loss is called as

    loss, stats = LOSSES[name](advantages, policy_log_probs, old_log_probs, response_mask, **numbers)

with advantages A (batch, 1) or anything that broadcasts to (batch, seq), the others (batch, seq),
`response_mask` true on response tokens. `stats` are detached per-token values (batch, seq) for the caller to
average over response tokens. Where the mask is false, loss and stats are to be ignored.
In the formulas rho = exp(policy_log_probs - old_log_probs) and sg = stop-gradient.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rlreason.objectives.aggregation import masked_mean
from rlreason.objectives.loss import RHO, Formula, Loss
from rlreason.objectives.ratio import masked_log_ratio
from rlreason.types import LARGE, Range

if TYPE_CHECKING:  # so that --help, the card and the rules need no torch
    from torch import Tensor

    from rlreason.objectives.loss import LossAndStats

LOSSES: dict[str, Loss] = {}


def policy_gradient(advantages: Tensor, policy_log_probs: Tensor) -> LossAndStats:
    """-A log pi: REINFORCE (Williams 1992), without any ratio. `A` may be a raw reward or an advantage."""
    return -advantages * policy_log_probs, {}


def _plain_formula() -> Formula:
    return Formula("l = -A log pi", r"\ell_t = -A \log \pi_\theta(y_t)", "no ratio, no clip")


# One formula under two names, which say whether A is a raw reward or an advantage.
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
    floats = {name: flag.to(ratio.dtype) for name, flag in {"clipped": lost, **stats}.items()}
    return -surrogate, {"ratio": ratio.detach(), **floats}


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


def _grpo_clip_formula(cliprange_low: float, cliprange_high: float, dual_clip: float | None = None) -> Formula:
    return _clipped_formula(
        ("rho", r"\rho_t", "rho = pi / pi_old", RHO), cliprange_low, cliprange_high, dual_clip=dual_clip
    )


def _dual_clip_problems(cliprange_low: float, cliprange_high: float, dual_clip: float | None = None) -> list[str]:
    least = 1 + cliprange_high
    if dual_clip is None or dual_clip > least:
        return []
    return [f"dual_clip={dual_clip}: it must lie above 1 + cliprange_high={least}; 3.0 is usual"]


LOSSES["grpo_clip"] = Loss(
    grpo_clip,
    _grpo_clip_formula,
    {
        **CLIP_RANGES,
        "dual_clip": Range(1, LARGE, "it bounds the loss by -dual_clip A where A < 0: try 3.0", above=True),
    },
    _dual_clip_problems,
)


def grpo_no_clip(
    advantages: Tensor, policy_log_probs: Tensor, old_log_probs: Tensor, response_mask: Tensor
) -> LossAndStats:
    """-rho A: the importance-weighted policy gradient without a trust region (the handout's GRPO-No-Clip)."""
    ratio = masked_log_ratio(policy_log_probs, old_log_probs, response_mask).exp()
    return -ratio * advantages, {"ratio": ratio.detach()}


def _no_clip_formula() -> Formula:
    return Formula("l = -rho A, rho = pi / pi_old", RHO + r"\ell_t = -\rho_t A", "no clip")


LOSSES["grpo_no_clip"] = Loss(grpo_no_clip, _no_clip_formula)


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


def _gspo_formula(cliprange_low: float, cliprange_high: float) -> Formula:
    define = r"s = \exp\Big(\frac{1}{|y|}\sum_t \log \frac{\pi_\theta(y_t)}{\pi_{old}(y_t)}\Big),\quad "
    ratio = ("s", "s", "s = exp(mean over response tokens of log(pi / pi_old))", define)
    return _clipped_formula(ratio, cliprange_low, cliprange_high)


LOSSES["gspo"] = Loss(
    gspo,
    _gspo_formula,
    CLIP_RANGES,
    notes=(
        "GSPO: the paper clips at 3e-4 below and 4e-4 above, CS336 at 3e-4 on both sides; token-level "
        "ranges such as 0.2 practically never act on a mean over tokens.",
    ),
)


def cispo(
    advantages: Tensor,
    policy_log_probs: Tensor,
    old_log_probs: Tensor,
    response_mask: Tensor,
    *,
    ratio_cap: float,
) -> LossAndStats:
    """-sg(min(rho, cap)) A log pi: the weight is capped, the gradient of every token stays.

    CISPO, arXiv 2506.13585. `ratio_cap` is the largest weight itself, not a distance from 1.
    """
    ratio = masked_log_ratio(policy_log_probs, old_log_probs, response_mask).exp().detach()
    stats = {"ratio": ratio, "clipped": (ratio > ratio_cap).to(ratio.dtype)}
    return -ratio.clamp(max=ratio_cap) * advantages * policy_log_probs, stats


def _cispo_formula(ratio_cap: float) -> Formula:
    cap = f"{ratio_cap:g}"
    return Formula(
        f"l = -sg(min(rho, {cap})) A log pi, rho = pi / pi_old",
        RHO + rf"\ell_t = -\operatorname{{sg}}\left[\min(\rho_t, {cap})\right] A \log \pi_\theta(y_t)",
        f"absolute cap {cap}, no gradient through the weight",
    )


LOSSES["cispo"] = Loss(
    cispo,
    _cispo_formula,
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
    return -4 / tau * (tau * (ratio - 1)).sigmoid() * advantages, {"ratio": ratio.detach()}


def _sapo_formula(tau_pos: float, tau_neg: float) -> Formula:
    return Formula(
        f"l = -4 / tau sigmoid(tau (rho - 1)) A, tau = {tau_pos:g} if A > 0 else {tau_neg:g}, rho = pi / pi_old",
        RHO + r"\ell_t = -\frac{4}{\tau} \sigma\left(\tau (\rho_t - 1)\right) A,\quad "
        rf"\tau = {tau_pos:g} \text{{ if }} A > 0 \text{{ else }} {tau_neg:g}",
        f"soft gate, tau_pos={tau_pos:g}, tau_neg={tau_neg:g}",
    )


LOSSES["sapo"] = Loss(
    sapo,
    _sapo_formula,
    {
        "tau_pos": Range(1e-3, 1e3, "it is the gate's steepness where A > 0: try 1.0"),
        "tau_neg": Range(1e-3, 1e3, "it is the gate's steepness where A is not above 0: try 1.05"),
    },
    published={"SAPO (arXiv 2511.20347)": {"tau_pos": 1.0, "tau_neg": 1.05}},
)
