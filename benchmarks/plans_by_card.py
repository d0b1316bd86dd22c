"""Which model fits which card: the memory plan of the handouts' runs, as the table of docs/scale.md.

    python benchmarks/plans_by_card.py            # prints it
    python benchmarks/plans_by_card.py FILE.md    # writes it between the file's markers

Nothing is loaded and no GPU is needed: it is arithmetic (docs/doctor.md), and nobody has measured it on a card.
tests/test_preflight.py makes the table again and holds the page against it.
"""

import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from hydra import compose, initialize_config_dir  # noqa: E402

from rlreason.config.run import RunConfig  # noqa: E402
from rlreason.config.store import register, typed  # noqa: E402
from rlreason.model.hours import Card  # noqa: E402
from rlreason.model.plan import Planned, planned  # noqa: E402
from rlreason.runtime.machine import Device  # noqa: E402
from rlreason.runtime.text import size  # noqa: E402
from rlreason.training.preflight import assumed_prompt  # noqa: E402

BEGIN, END = "<!-- plans by card: benchmarks/plans_by_card.py -->", "<!-- end of plans by card -->"
CARDS = (16, 24, 40, 80)  # GB
EXPERIMENTS = {
    "cs336_2025": "Qwen2.5-Math-1.5B, MATH",
    "cs336_2026": "OLMo-2-1B, GSM8K",
    "pku_hw3": "Qwen3-0.6B, GSM8K",
}
WORDS = ("rollout=vllm", "data.path=a/b")  # what rollout=auto takes on a GPU; the data is not read
HEAD = (
    "| run | card | as it is | first overrides of the list that fit |",
    "|---|---|---|---|",
)


@cache
def table() -> list[str]:
    """The table in lines of markdown."""
    return [*HEAD, *(row for experiment in EXPERIMENTS for row in rows(experiment))]


def rows(experiment: str) -> Iterator[str]:
    """A row for each card."""
    run = asked(f"experiment={experiment}", *WORDS)
    name = f"`experiment={experiment}` ({EXPERIMENTS[experiment]})"
    for gigabytes in CARDS:
        told = planned(run, card(gigabytes), assumed_prompt(run))
        assert told.plan is not None
        plan = f"{size(told.plan.peak)} in {told.plan.when}: {told.verdict}"
        cells = (
            name if gigabytes == CARDS[0] else "",
            f"{gigabytes} GB",
            plan,
            _cell(told),
        )
        yield f"| {' | '.join(cells)} |"


def _cell(told: Planned) -> str:
    found = told.cure
    if told.verdict == "fits":
        return "-"
    if found is None:
        return "none"
    return f"`{' '.join(found.overrides)}`: {size(found.peak)}{'' if found.same_result else ' *'}"


def card(gigabytes: int) -> Device:
    """An empty card of so many GB that computes bfloat16."""
    return Card(gigabytes, step=(0, 0)).device("a card")


def asked(*words: str) -> RunConfig:
    """The settings of a run of these words."""
    register()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        run = typed(compose("config", list(words)))
    assert isinstance(run, RunConfig)
    return run


def put_between(text: str, lines: Sequence[str]) -> str:
    """A page with these lines between its markers.

    >>> put_between(f"a\\n{BEGIN}\\nold\\n{END}\\nb", ["new"]) == f"a\\n{BEGIN}\\nnew\\n{END}\\nb"
    True
    """
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return "\n".join([f"{before}{BEGIN}", *lines, f"{END}{after}"])


if __name__ == "__main__":
    if sys.argv[1:]:
        page = Path(sys.argv[1])
        page.write_text(put_between(page.read_text(encoding="utf-8"), table()), encoding="utf-8")
    else:
        print("\n".join([BEGIN, *table(), END]))
