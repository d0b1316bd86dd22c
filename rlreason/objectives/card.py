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

    def with_head(self, head: str) -> "Card":
        """The card of a run whose output head multiplies numbers of this type; as it is for float32.

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
    entries = [entry for row in rows for entry in _of_row(row)]
    entries.append(("Equals", "; ".join(equal) or "no named or published objective"))
    return (*entries, *(("Note", sentence) for sentence in differs))


def _of_row(row: Row) -> list[tuple[str, str]]:
    return [(row.title, row.plain), *([("", row.note)] if row.note else [])]


def _entry(title: str, text: str, width: int) -> str:
    """One labelled paragraph, wrapped and indented."""
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
