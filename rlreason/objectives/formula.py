"""The objective's formula part by part, in plain text and LaTeX, from plain settings.

Knows settings only; must not import torch, and computes nothing.
"""

from typing import NamedTuple

from rlreason.objectives.rules import Settings


class Row(NamedTuple):
    """One part of the formula: its title, plain text, LaTeX, and remarks."""

    title: str
    plain: str
    latex: str
    note: str = ""


_BASELINE = {
    "mean": ("r - mean(group)", r"r_i - \bar r_{g}"),
    "none": ("r", "r_i"),
    "leave_one_out": ("r - mean(others of the group)", r"r_i - \frac{1}{G-1}\sum_{j \ne i} r_j"),
}
_NORMALIZER = {
    "group_std": ("std(group)", r"\operatorname{std}_{g}(r)", "unbiased std (ddof 1) within the group"),
    "batch_std": ("std(batch)", r"\operatorname{std}(r)", "unbiased std (ddof 1) over the rollout batch"),
    "group_mean": ("mean(group)", r"\bar r_{g}", "mean of the group's rewards, which must not be negative"),
}
_RHO = r"\rho_t = \frac{\pi_\theta(y_t)}{\pi_{old}(y_t)},\quad "
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


def _advantage(s: Settings) -> Row:
    plain, latex = _BASELINE[s["baseline"]]
    note = f"baseline={s['baseline']}, std_norm={s['std_norm']}; groups by problem id"
    if s["std_norm"] == "none":
        return Row("Advantage", f"A = {plain}", f"A_i = {latex}", f"{note}; no divisor, so no eps")
    divisor, divisor_latex, what = _NORMALIZER[s["std_norm"]]
    eps = f"{s['advantage_eps']:g}"
    return Row(
        "Advantage",
        f"A = ({plain}) / ({divisor} + {eps})",
        rf"A_i = \frac{{{latex}}}{{{divisor_latex} + {eps}}}",
        f"{note}; {what}, eps {eps}",
    )


def _loss(s: Settings) -> Row:
    loss = s["loss_type"]
    if loss in ("no_baseline", "reinforce_with_baseline"):
        return Row("Token loss", "l = -A log pi", r"\ell_t = -A \log \pi_\theta(y_t)", f"{loss}; no ratio, no clip")
    if loss == "grpo_no_clip":
        return Row(
            "Token loss",
            "l = -rho A, rho = pi / pi_old",
            _RHO + r"\ell_t = -\rho_t A",
            "grpo_no_clip; no clip",
        )
    if loss == "cispo":
        cap = f"{s['ratio_cap']:g}"
        return Row(
            "Token loss",
            f"l = -sg(min(rho, {cap})) A log pi, rho = pi / pi_old",
            _RHO + rf"\ell_t = -\operatorname{{sg}}\left[\min(\rho_t, {cap})\right] A \log \pi_\theta(y_t)",
            f"cispo; absolute cap {cap}, no gradient through the weight",
        )
    return _clipped_loss(s)


def _clipped_loss(s: Settings) -> Row:
    low, high = f"{1 - s['cliprange_low']:g}", f"{1 + s['cliprange_high']:g}"
    if s["loss_type"] == "gspo":
        name, symbol, meaning = "s", "s", "s = exp(mean over response tokens of log(pi / pi_old))"
        define = r"s = \exp\Big(\frac{1}{|y|}\sum_t \log \frac{\pi_\theta(y_t)}{\pi_{old}(y_t)}\Big),\quad "
    else:
        name, symbol, meaning, define = "rho", r"\rho_t", "rho = pi / pi_old", _RHO
    plain = f"min({name} A, clip({name}, {low}, {high}) A)"
    latex = rf"\min\left({symbol} A,\ \operatorname{{clip}}({symbol}, {low}, {high}) A\right)"
    note = f"{s['loss_type']}; cliprange_low={s['cliprange_low']:g}, cliprange_high={s['cliprange_high']:g}"
    if s["dual_clip"] is not None:
        bound = f"{s['dual_clip']:g}"
        plain, latex = (
            f"max({plain}, {bound} A if A < 0)",
            rf"\max\left({latex},\ {bound} A \text{{ if }} A < 0\right)",
        )
        note += f", dual clip {bound}"
    return Row("Token loss", f"l = -{plain}, {meaning}", f"{define}\\ell_t = -{latex}", note)


def aggregation_row(s: Settings) -> Row:
    shared = "counted over the whole optimizer step (all micro-batches and ranks)"
    if s["length_norm"] == "masked_mean":
        plain, latex = (
            "mean over sequences of (mean over tokens of l)",
            r"\frac1N \sum_i \frac{1}{|y_i|} \sum_t \ell_{i,t}",
        )
        note = f"N sequences, {shared}; every sequence weighs the same"
    elif s["length_norm"] == "token":
        plain, latex = "sum of l / number of tokens", r"\frac{1}{\sum_i |y_i|} \sum_i \sum_t \ell_{i,t}"
        note = f"tokens {shared}; every token weighs the same within a step"
    else:
        constant = "longest possible response" if s["constant"] is None else f"{s['constant']:g}"
        plain = f"sum of l / (C x number of sequences), C = {constant}"
        latex = r"\frac{1}{C N} \sum_i \sum_t \ell_{i,t}"
        note = f"C = {constant}, N sequences, {shared}; every token weighs the same in every step"
    return Row("Aggregation", f"L = {plain}", f"L = {latex}", f"length_norm={s['length_norm']}; {note}")


def _kl(s: Settings) -> Row:
    if s["kl_placement"] == "none":
        return Row("KL", "none", "", "no reference model")
    plain, latex = _KL[s["kl_estimator"]]
    coef, note = f"{s['kl_coef']:g}", _KL_NOTE[s["kl_estimator"], s["kl_placement"]]
    define = r"x_t = \log \frac{\pi_\theta(y_t)}{\pi_{ref}(y_t)},\quad "
    if s["kl_placement"] == "loss":
        plain, latex = f"l + {coef} ({plain})", rf"\ell_t \leftarrow \ell_t + {coef}\,({latex})"
    else:
        plain = f"r - {coef} sum over tokens of ({plain}), before the baseline"
        latex = rf"r_i \leftarrow r_i - {coef} \sum_t ({latex})"
    return Row(
        "KL",
        f"{plain}, x = log pi - log ref",
        define + latex,
        f"{s['kl_estimator']} in the {s['kl_placement']}; {note}",
    )


def _mismatch(s: Settings) -> Row:
    if s["mismatch"] == "none":
        return Row("Mismatch", "none", "", "the gap between engine and trainer log-probs is not corrected")
    cap = f"{s['mismatch_cap']:g}"
    define = r"w_t = \frac{\pi_{old}(y_t)}{\pi_{engine}(y_t)},\quad "
    if s["mismatch"] == "truncate":
        plain, latex = f"min(w, {cap})", rf"\min(w_t, {cap})"
    else:
        plain, latex = f"(w if w <= {cap} else 0)", rf"w_t\,[w_t \le {cap}]"
    return Row(
        "Mismatch",
        f"l x {plain}, w = pi_old / pi_engine",
        define + rf"\ell_t \leftarrow \operatorname{{sg}}\left[{latex}\right] \ell_t",
        f"{s['mismatch']}, cap {cap}, per token, no gradient",
    )


def _overlong_penalty() -> Row:
    latex = r"r_i \leftarrow r_i + \min(0, \max(-1, (L_{max} - L_{cache} - |y_i|) / L_{cache}))"
    return Row("Overlong", "r + soft length penalty in [-1, 0], before the baseline", latex, "DAPO's formula")


def _entropy(s: Settings) -> Row:
    coef = f"{s['entropy_coef']:g}"
    return Row("Entropy", f"l - {coef} H(pi)", rf"\ell_t \leftarrow \ell_t - {coef}\, H(\pi_\theta)", "bonus")


def _overlong_mask(s: Settings) -> Row:
    effect = "still counts in N" if s["length_norm"] == "constant" else "leaves the divisor too"
    return Row("Overlong", "truncated responses carry no loss", "", f"such a sequence {effect}")


def _zero_variance_skip(s: Settings) -> Row:
    if s["length_norm"] == "constant":
        effect = "they still count in N, so the policy gradient is unchanged"
    else:
        effect = "they leave the divisor too, so the gradient grows by all / live"
    if s["kl_placement"] == "loss" or s["entropy_coef"]:
        effect += "; the KL and entropy terms of their tokens are dropped"
    return Row("Zero variance", "groups of equal rewards are skipped", "", effect)


def _samples(s: Settings) -> Row:
    epochs = s["epochs_per_rollout"]
    where = "one optimizer step per rollout batch" if s["on_policy"] else "several optimizer steps per rollout batch"
    return Row(
        "Samples",
        "on policy" if s["on_policy"] else "off policy",
        "",
        f"{where}; epochs_per_rollout={epochs}",
    )


def formula_rows(s: Settings) -> list[Row]:
    """Every part that applies, in the order of computation: rewards, advantage, token loss, divisor."""
    return [
        *([_overlong_penalty()] if s["overlong"] == "penalty" else []),
        *([_kl(s)] if s["kl_placement"] == "reward" else []),
        _advantage(s),
        _loss(s),
        _mismatch(s),
        *([_kl(s)] if s["kl_placement"] != "reward" else []),
        *([_entropy(s)] if s["entropy_coef"] else []),
        aggregation_row(s),
        *([_overlong_mask(s)] if s["overlong"] == "mask" else []),
        *([_zero_variance_skip(s)] if s["zero_variance"] == "skip" else []),
        _samples(s),
    ]
