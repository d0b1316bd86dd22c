"""The objective's formula part by part, in plain text and LaTeX."""

from typing import NamedTuple

from rlreason.objectives.advantages import BASELINES, STD_NORMS
from rlreason.objectives.objective import LengthNormConfig, Objective
from rlreason.objectives.own_loss import loss_named


class Row(NamedTuple):
    """One part of the formula: its title, plain text, LaTeX, and remarks."""

    title: str
    plain: str
    latex: str
    note: str = ""


_KL = {
    "k1": ("x", "x_t"),
    "k2": ("x^2 / 2", r"\tfrac12 x_t^2"),
    "k3": ("exp(-x) - 1 + x", "e^{-x_t} - 1 + x_t"),
}
_KL_NOTE = {
    ("k1", "loss"): "expected gradient: 0",
    ("k2", "loss"): "gradient: that of KL(pi || ref)",
    ("k3", "loss"): "gradient on samples from pi: that of KL(ref || pi), the other direction",
    ("k1", "reward"): "unbiased estimate of KL(pi || ref)",
    ("k2", "reward"): "biased estimate of KL(pi || ref)",
    ("k3", "reward"): "unbiased estimate of KL(pi || ref)",
}


def _advantage(o: Objective) -> Row:
    baseline, norm = BASELINES[o.baseline], STD_NORMS[o.std_norm]
    note = f"baseline={o.baseline}, std_norm={o.std_norm}; groups by problem id"
    if o.std_norm == "none":
        return Row("Advantage", f"A = {baseline.plain}", f"A_i = {baseline.latex}", f"{note}; no divisor, so no eps")
    eps = f"{o.advantage_eps:g}"
    return Row(
        "Advantage",
        f"A = ({baseline.plain}) / ({norm.plain} + {eps})",
        rf"A_i = \frac{{{baseline.latex}}}{{{norm.latex} + {eps}}}",
        f"{note}; {norm.note}, eps {eps}",
    )


def _loss(o: Objective) -> Row:
    plain, latex, note = loss_named(o.loss.loss_type).formula(**o.loss.numbers())
    return Row("Token loss", plain, latex, f"{o.loss.loss_type}; {note}")


def aggregation_row(norm: LengthNormConfig) -> Row:
    """What the losses of tokens are averaged over, in an optimizer step."""
    shared = "counted over the whole optimizer step (all micro-batches and ranks)"
    if norm.kind == "masked_mean":
        plain, latex = (
            "mean over sequences of (mean over tokens of l)",
            r"\frac1N \sum_i \frac{1}{|y_i|} \sum_t \ell_{i,t}",
        )
        note = f"N sequences, {shared}; every sequence weighs the same"
    elif norm.kind == "token":
        plain, latex = "sum of l / number of tokens", r"\frac{1}{\sum_i |y_i|} \sum_i \sum_t \ell_{i,t}"
        note = f"tokens {shared}; every token weighs the same within a step"
    else:
        constant = "longest possible response" if norm.constant is None else f"{norm.constant:g}"
        plain = f"sum of l / (C x number of sequences), C = {constant}"
        latex = r"\frac{1}{C N} \sum_i \sum_t \ell_{i,t}"
        note = f"C = {constant}, N sequences, {shared}; every token weighs the same in every step"
    return Row("Aggregation", f"L = {plain}", f"L = {latex}", f"length_norm={norm.kind}; {note}")


def _kl(o: Objective) -> Row:
    if o.kl_placement == "none":
        return Row("KL", "none", "", "no reference model")
    plain, latex = _KL[o.kl_estimator]
    coef, note = f"{o.kl_coef:g}", _KL_NOTE[o.kl_estimator, o.kl_placement]
    define = r"x_t = \log \frac{\pi_\theta(y_t)}{\pi_{ref}(y_t)},\quad "
    if o.kl_placement == "loss":
        plain, latex = f"l + {coef} ({plain})", rf"\ell_t \leftarrow \ell_t + {coef}\,({latex})"
    else:
        plain = f"r - {coef} sum over tokens of ({plain}), before the baseline"
        latex = rf"r_i \leftarrow r_i - {coef} \sum_t ({latex})"
    return Row(
        "KL",
        f"{plain}, x = log pi - log ref",
        define + latex,
        f"{o.kl_estimator} in the {o.kl_placement}; {note}",
    )


def _mismatch(o: Objective) -> Row:
    if o.mismatch == "none":
        return Row("Mismatch", "none", "", "the gap between engine and trainer log-probs is not corrected")
    cap = f"{o.mismatch_cap:g}"
    define = r"w_t = \frac{\pi_{old}(y_t)}{\pi_{engine}(y_t)},\quad "
    if o.mismatch == "truncate":
        plain, latex = f"min(w, {cap})", rf"\min(w_t, {cap})"
    else:
        plain, latex = f"(w if w <= {cap} else 0)", rf"w_t\,[w_t \le {cap}]"
    return Row(
        "Mismatch",
        f"l x {plain}, w = pi_old / pi_engine",
        define + rf"\ell_t \leftarrow \operatorname{{sg}}\left[{latex}\right] \ell_t",
        f"{o.mismatch}, cap {cap}, per token, no gradient",
    )


def _overlong_penalty() -> Row:
    latex = r"r_i \leftarrow r_i + \min(0, \max(-1, (L_{max} - L_{cache} - |y_i|) / L_{cache}))"
    return Row("Overlong", "r + soft length penalty in [-1, 0], before the baseline", latex, "DAPO's formula")


def _entropy(o: Objective) -> Row:
    coef = f"{o.entropy_coef:g}"
    return Row("Entropy", f"l - {coef} H(pi)", rf"\ell_t \leftarrow \ell_t - {coef}\, H(\pi_\theta)", "bonus")


def _overlong_mask(o: Objective) -> Row:
    effect = "still counts in N" if o.length_norm.kind == "constant" else "leaves the divisor too"
    return Row("Overlong", "truncated responses carry no loss", "", f"such a sequence {effect}")


def _zero_variance_skip(o: Objective) -> Row:
    if o.length_norm.kind == "constant":
        effect = "they still count in N, so the policy gradient is unchanged"
    else:
        effect = "they leave the divisor too, so the gradient grows by all / live"
    if o.kl_placement == "loss" or o.entropy_coef:
        effect += "; the KL and entropy terms of their tokens are dropped"
    return Row("Zero variance", "groups of equal rewards are skipped", "", effect)


def _samples(o: Objective) -> Row:
    on_policy = o.updates_per_rollout == 1
    where = f"{'one optimizer step' if on_policy else 'several optimizer steps'} per rollout batch"
    note = f"{where}; epochs_per_rollout={o.epochs_per_rollout}"
    return Row("Samples", "on policy" if on_policy else "off policy", "", note)


def formula_rows(o: Objective) -> list[Row]:
    """Every part that applies, in the order of computation: rewards, advantage, token loss, divisor."""
    return [
        *([_overlong_penalty()] if o.overlong == "penalty" else []),
        *([_kl(o)] if o.kl_placement == "reward" else []),
        _advantage(o),
        _loss(o),
        _mismatch(o),
        *([_kl(o)] if o.kl_placement != "reward" else []),
        *([_entropy(o)] if o.entropy_coef else []),
        aggregation_row(o.length_norm),
        *([_overlong_mask(o)] if o.overlong == "mask" else []),
        *([_zero_variance_skip(o)] if o.zero_variance == "skip" else []),
        _samples(o),
    ]
