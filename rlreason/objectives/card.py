"""The objective card: the resolved formula in plain text and in LaTeX, part by part."""

import textwrap
from dataclasses import dataclass

from rlreason.objectives.advantages import BASELINES, STD_NORMS
from rlreason.objectives.losses import Formula, loss_named
from rlreason.objectives.objective import LengthNormConfig, Objective
from rlreason.objectives.published import differences, equal_objectives

_KL = {"k1": ("x", "x_t"), "k2": ("x^2 / 2", r"\tfrac12 x_t^2"), "k3": ("exp(-x) - 1 + x", "e^{-x_t} - 1 + x_t")}
_KL_NOTE = {
    ("k1", "loss"): "expected gradient: 0",
    ("k2", "loss"): "gradient: that of KL(pi || ref)",
    ("k3", "loss"): "gradient on samples from pi: that of KL(ref || pi), the other direction",
    ("k1", "reward"): "unbiased estimate of KL(pi || ref)",
    ("k2", "reward"): "biased estimate of KL(pi || ref)",
    ("k3", "reward"): "unbiased estimate of KL(pi || ref)",
}


def _aggregation(norm: LengthNormConfig) -> Formula:
    """Describe what an optimizer step averages token losses over."""
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
    return Formula(f"L = {plain}", f"L = {latex}", f"length_norm={norm.kind}; {note}")


def _kl(o: Objective) -> Formula:
    if o.kl_placement == "none":
        return Formula("none", "", "no reference model")
    plain, latex = _KL[o.kl_estimator]
    coef, note = f"{o.kl_coef:g}", _KL_NOTE[o.kl_estimator, o.kl_placement]
    define = r"x_t = \log \frac{\pi_\theta(y_t)}{\pi_{ref}(y_t)},\quad "
    if o.kl_placement == "loss":
        plain, latex = f"l + {coef} ({plain})", rf"\ell_t \leftarrow \ell_t + {coef}\,({latex})"
    else:
        plain = f"r - {coef} sum over tokens of ({plain}), before the baseline"
        latex = rf"r_i \leftarrow r_i - {coef} \sum_t ({latex})"
    return Formula(
        f"{plain}, x = log pi - log ref", define + latex, f"{o.kl_estimator} in the {o.kl_placement}; {note}"
    )


def _formulas(o: Objective) -> dict[str, Formula]:
    """Return every part that applies, in the order of computation: rewards, advantage, token loss, divisor."""
    parts: dict[str, Formula] = {}
    if o.overlong == "penalty":
        latex = r"r_i \leftarrow r_i + \min(0, \max(-1, (L_{max} - L_{cache} - |y_i|) / L_{cache}))"
        plain = "r + soft length penalty in [-1, 0], before the baseline"
        parts["Overlong"] = Formula(plain, latex, "DAPO's formula")
    if o.kl_placement == "reward":
        parts["KL"] = _kl(o)
    baseline, norm, eps = BASELINES[o.baseline], STD_NORMS[o.std_norm], f"{o.advantage_eps:g}"
    note = f"baseline={o.baseline}, std_norm={o.std_norm}; groups by problem id"
    if o.std_norm == "none":
        plain, latex, note = f"A = {baseline.plain}", f"A_i = {baseline.latex}", f"{note}; no divisor, so no eps"
    else:
        plain = f"A = ({baseline.plain}) / ({norm.plain} + {eps})"
        latex = rf"A_i = \frac{{{baseline.latex}}}{{{norm.latex} + {eps}}}"
        note += f"; {norm.note}, eps {eps}"
    parts["Advantage"] = Formula(plain, latex, note)
    plain, latex, note = loss_named(o.loss.loss_type).formula(**o.loss.numbers())
    parts["Token loss"] = Formula(plain, latex, f"{o.loss.loss_type}; {note}")
    plain, latex, note = "none", "", "the gap between engine and trainer log-probs is not corrected"
    if o.old_from_engine:
        note = "pi_old is the engine's, so the ratio holds the gap between engine and trainer"
    if o.has_mismatch_weights:
        cap = f"{o.mismatch_cap:g}"
        plain, latex = f"(w if w <= {cap} else 0)", rf"w_t\,[w_t \le {cap}]"
        if o.mismatch == "truncate":
            plain, latex = f"min(w, {cap})", rf"\min(w_t, {cap})"
        plain = f"l x {plain}, w = {'pi' if o.samples_ahead else 'pi_old'} / pi_engine"
        define = rf"w_t = \frac{{\pi{'' if o.samples_ahead else '_{old}'}(y_t)}}{{\pi_{{engine}}(y_t)}},\quad "
        latex = define + rf"\ell_t \leftarrow \operatorname{{sg}}\left[{latex}\right] \ell_t"
        note = f"{o.mismatch}, cap {cap}, per token, no gradient"
    parts["Mismatch"] = Formula(plain, latex, note)
    if o.kl_placement != "reward":
        parts["KL"] = _kl(o)
    if o.entropy_coef:
        coef, latex = f"{o.entropy_coef:g}", r"\ell_t \leftarrow \ell_t - {}\, H(\pi_\theta)"
        parts["Entropy"] = Formula(f"l - {coef} H(pi)", latex.format(coef), "bonus")
    parts["Aggregation"] = _aggregation(o.length_norm)
    counted = o.length_norm.kind == "constant"
    if o.overlong == "mask":
        effect = "still counts in N" if counted else "leaves the divisor too"
        parts["Overlong"] = Formula("truncated responses carry no loss", "", f"such a sequence {effect}")
    if o.zero_variance == "skip":
        effect = "they leave the divisor too, so the gradient grows by all / live"
        if counted:
            effect = "they still count in N, so the policy gradient is unchanged"
        effect += "; KL and entropy terms of their tokens are dropped"
        parts["Zero variance"] = Formula("groups of equal rewards are skipped", "", effect)
    source = "on policy" if o.ratio_is_one else "off policy" + ", drawn an update ahead" * o.samples_ahead
    note = f"optimizer steps per rollout batch: {o.updates_per_rollout}; epochs_per_rollout={o.epochs_per_rollout}"
    return parts | {"Samples": Formula(source, "", note)}


TEXT_WIDTH = 110  # columns


@dataclass(frozen=True, slots=True)
class Card:
    """One objective: the parts of its formula by title, the published ones that it equals, and how it differs."""

    parts: dict[str, Formula]
    equal: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def fitted(self, width: int = TEXT_WIDTH) -> str:
        """Return the card for a terminal, in at most `width` columns."""
        entries = []
        for title, part in self.parts.items():
            entries += [(title, part.plain), ("", part.note)]
        entries.append(("Equals", "; ".join(self.equal) or "no named or published objective"))
        entries += [("Note", note) for note in self.notes]
        lines = ["Objective"]
        for title, text in entries:
            label = f"  {title:<14} "
            lines.append(textwrap.fill(text, width, initial_indent=label, subsequent_indent=" " * len(label)))
        return "\n".join(lines) + "\n"

    @property
    def markdown(self) -> str:
        """The card with LaTeX, for a file."""
        texts = ["# Objective"]
        for title, part in self.parts.items():
            texts += [f"## {title}", f"$$\n{part.latex}\n$$" if part.latex else part.plain, part.note]
        texts += ["## Equals", "\n".join(f"- {title}" for title in self.equal) or "No named or published objective."]
        texts += [f"- {note}" for note in self.notes]
        return "\n\n".join(filter(None, texts)) + "\n"


def objective_card(objective: Objective) -> Card:
    """Return the card of an objective whose settings do not contradict each other.

    >>> print(objective_card(Objective(std_norm="none")).fitted().splitlines()[1])
      Advantage      A = r - mean(group)
    """
    equal, notes = equal_objectives(objective), differences(objective)
    return Card(_formulas(objective), tuple(equal), tuple(notes))


def imitation_card(length_norm: LengthNormConfig, sampled: bool) -> Card:
    """Return the card of SFT, or of expert iteration if the responses are sampled: `-A log p` with A = 1.

    >>> print(imitation_card(LengthNormConfig("token"), sampled=False).fitted().splitlines()[1])
      Token loss     l = -log pi
    """
    source = "sampled responses that were graded correct" if sampled else "given responses"
    note = f"on the response tokens of {source}, end included"
    formula = Formula("l = -log pi", r"\ell_t = -\log \pi_\theta(y_t)", note)
    equal = "expert iteration (RFT, STaR)" if sampled else "SFT, maximum likelihood"
    return Card({"Token loss": formula, "Aggregation": _aggregation(length_norm)}, (equal,))
