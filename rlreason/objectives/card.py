"""The objective card: the resolved formula in plain text and in LaTeX, and the published objectives it equals.

Every run prints the text and stores the Markdown.
"""

import textwrap
from dataclasses import dataclass

from rlreason.objectives.formula import Row, aggregation_row, formula_rows
from rlreason.objectives.objective import LengthNormConfig, Objective
from rlreason.objectives.published import differences, equal_objectives
from rlreason.objectives.rules import check_objective

TEXT_WIDTH = 110  # columns


@dataclass(frozen=True, slots=True)
class Card:
    """One objective, described twice: `text` for a terminal, `markdown` with LaTeX for a file."""

    entries: tuple[tuple[str, str], ...]  # (label, sentence)
    markdown: str

    @property
    def text(self) -> str:
        """The lines for a terminal of `TEXT_WIDTH` columns."""
        return self.fitted(TEXT_WIDTH)

    def fitted(self, width: int) -> str:
        """The text in at most `width` columns."""
        return "\n".join(["Objective", *(_entry(title, text, width) for title, text in self.entries)]) + "\n"


def objective_card(objective: Objective) -> Card:
    """The card of an objective; `ValueError` where its settings contradict each other.

    >>> print(objective_card(Objective(std_norm="none")).text.splitlines()[1])
      Advantage      A = r - mean(group)
    """
    if problems := check_objective(objective):
        raise ValueError("no card for a contradictory objective:\n" + "\n".join(problems))
    rows = formula_rows(objective)
    equal, differs = equal_objectives(objective), list(differences(objective))
    return Card(_entries(rows, equal, differs), _as_markdown(rows, equal, differs))


def imitation_card(length_norm: LengthNormConfig, sampled: bool) -> Card:
    """The card of SFT, or of expert iteration when the responses are sampled: `-A log p` with A = 1.

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
    entries = []
    for row in rows:
        entries += [(row.title, row.plain), *([("", row.note)] if row.note else [])]
    entries.append(("Equals", "; ".join(equal) or "no named or published objective"))
    return (*entries, *(("Note", sentence) for sentence in differs))


def _entry(title: str, text: str, width: int) -> str:
    """One labelled paragraph, wrapped and indented."""
    label = f"  {title:<14} "
    return textwrap.fill(text, width, initial_indent=label, subsequent_indent=" " * len(label))


def _as_markdown(rows: list[Row], equal: list[str], differs: list[str]) -> str:
    parts = ["# Objective"]
    for row in rows:
        formula = f"$$\n{row.latex}\n$$" if row.latex else row.plain[:1].upper() + row.plain[1:] + "."
        parts += [f"## {row.title}", formula, *([row.note] if row.note else [])]
    parts += ["## Equals", "\n".join(f"- {title}" for title in equal) or "No named or published objective."]
    parts += ["## Differences worth knowing", "\n".join(f"- {sentence}" for sentence in differs)] if differs else []
    return "\n\n".join(parts) + "\n"
