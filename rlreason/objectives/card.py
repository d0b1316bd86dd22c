"""The objective card: the resolved formula in plain text and in LaTeX, part by part."""

import textwrap
from dataclasses import dataclass
from typing import NamedTuple

from rlreason.objectives.advantages import BASELINES, STD_NORMS
from rlreason.objectives.losses import loss_named
from rlreason.objectives.objective import LengthNormConfig, Objective
from rlreason.objectives.published import check_objective, differences, equal_objectives


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


def formula_rows(o: Objective) -> list[Row]:
    """Return every part that applies, in the order of computation: rewards, advantage, token loss, divisor."""
    rows = []
    if o.overlong == "penalty":
        latex = r"r_i \leftarrow r_i + \min(0, \max(-1, (L_{max} - L_{cache} - |y_i|) / L_{cache}))"
        plain = "r + soft length penalty in [-1, 0], before the baseline"
        rows.append(Row("Overlong", plain, latex, "DAPO's formula"))
    if o.kl_placement == "reward":
        rows.append(_kl(o))
    rows += [_advantage(o), _loss(o), _mismatch(o)]
    if o.kl_placement != "reward":
        rows.append(_kl(o))
    if o.entropy_coef:
        coef, latex = f"{o.entropy_coef:g}", r"\ell_t \leftarrow \ell_t - {}\, H(\pi_\theta)"
        rows.append(Row("Entropy", f"l - {coef} H(pi)", latex.format(coef), "bonus"))
    rows.append(aggregation_row(o.length_norm))
    counted = o.length_norm.kind == "constant"
    if o.overlong == "mask":
        effect = "still counts in N" if counted else "leaves the divisor too"
        rows.append(Row("Overlong", "truncated responses carry no loss", "", f"such a sequence {effect}"))
    if o.zero_variance == "skip":
        effect = "they leave the divisor too, so the gradient grows by all / live"
        if counted:
            effect = "they still count in N, so the policy gradient is unchanged"
        if o.kl_placement == "loss" or o.entropy_coef:
            effect += "; the KL and entropy terms of their tokens are dropped"
        rows.append(Row("Zero variance", "groups of equal rewards are skipped", "", effect))
    on_policy = o.updates_per_rollout == 1
    where = f"{'one optimizer step' if on_policy else 'several optimizer steps'} per rollout batch"
    note = f"{where}; epochs_per_rollout={o.epochs_per_rollout}"
    return [*rows, Row("Samples", "on policy" if on_policy else "off policy", "", note)]


TEXT_WIDTH = 110  # columns


@dataclass(frozen=True, slots=True)
class Card:
    """One objective, described twice: `text` for a terminal, `markdown` with LaTeX for a file."""

    entries: tuple[tuple[str, str], ...]  # (label, sentence)
    markdown: str

    @property
    def text(self) -> str:
        """The card for a terminal of `TEXT_WIDTH` columns."""
        return self.fitted(TEXT_WIDTH)

    def fitted(self, width: int) -> str:
        """Return the text in at most `width` columns."""
        return "\n".join(["Objective", *(_entry(title, text, width) for title, text in self.entries)]) + "\n"

    def with_head(self, head: str) -> "Card":
        """Return the card of a run whose output head has operands of this type; unchanged for float32.

        >>> print(objective_card(Objective(std_norm="none")).with_head("bfloat16").text.splitlines()[-2])
                         h and W rounded to bfloat16; sums, logits and log-sum-exps in float32
        """
        if head == "float32":
            return self
        row = Row(
            "Output head",
            "log pi = log softmax(h W^T / T)",
            r"\log \pi_\theta = \log \operatorname{softmax}\!\left(h W^\top / T\right)",
            f"h and W rounded to {head}; sums, logits and log-sum-exps in float32",
        )
        place = [label for label, _ in self.entries].index("Equals")
        entries = (*self.entries[:place], *_of_row(row), *self.entries[place:])
        return Card(entries, self.markdown.replace("## Equals", "\n\n".join([*_sections(row), "## Equals"]), 1))


def objective_card(objective: Objective) -> Card:
    """Return the card of an objective; `ValueError` if its settings contradict each other.

    >>> print(objective_card(Objective(std_norm="none")).text.splitlines()[1])
      Advantage      A = r - mean(group)
    """
    if problems := check_objective(objective):
        raise ValueError("no card for a contradictory objective:\n" + "\n".join(problems))
    rows = formula_rows(objective)
    equal, differs = equal_objectives(objective), list(differences(objective))
    return Card(_entries(rows, equal, differs), _as_markdown(rows, equal, differs))


def imitation_card(length_norm: LengthNormConfig, sampled: bool) -> Card:
    """Return the card of SFT, or of expert iteration if the responses are sampled: `-A log p` with A = 1.

    >>> print(imitation_card(LengthNormConfig("token"), sampled=False).text.splitlines()[1])
      Token loss     l = -log pi
    """
    source = "sampled responses that were graded correct" if sampled else "given responses"
    rows = [
        Row(
            "Token loss",
            "l = -log pi",
            r"\ell_t = -\log \pi_\theta(y_t)",
            f"on the response tokens of {source}, end included",
        ),
        aggregation_row(length_norm),
    ]
    equal = ["expert iteration (RFT, STaR)"] if sampled else ["SFT, maximum likelihood"]
    return Card(_entries(rows, equal, []), _as_markdown(rows, equal, []))


def _entries(rows: list[Row], equal: list[str], differs: list[str]) -> tuple[tuple[str, str], ...]:
    entries = [entry for row in rows for entry in _of_row(row)]
    entries.append(("Equals", "; ".join(equal) or "no named or published objective"))
    return (*entries, *(("Note", sentence) for sentence in differs))


def _of_row(row: Row) -> list[tuple[str, str]]:
    return [(row.title, row.plain), *([("", row.note)] if row.note else [])]


def _entry(title: str, text: str, width: int) -> str:
    """Format one labelled paragraph, wrapped and indented."""
    label = f"  {title:<14} "
    return textwrap.fill(text, width, initial_indent=label, subsequent_indent=" " * len(label))


def _sections(row: Row) -> list[str]:
    formula = f"$$\n{row.latex}\n$$" if row.latex else row.plain[:1].upper() + row.plain[1:] + "."
    return [f"## {row.title}", formula, *([row.note] if row.note else [])]


def _as_markdown(rows: list[Row], equal: list[str], differs: list[str]) -> str:
    parts = ["# Objective", *(part for row in rows for part in _sections(row))]
    parts += ["## Equals", "\n".join(f"- {title}" for title in equal) or "No named or published objective."]
    parts += ["## Differences worth knowing", "\n".join(f"- {sentence}" for sentence in differs)] if differs else []
    return "\n\n".join(parts) + "\n"
