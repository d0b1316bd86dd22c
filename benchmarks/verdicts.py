"""How often is one of two equal settings called better? This project's rule beside packages for evaluations.

    python -m venv tools && tools/bin/pip install evalstats errorbars evalsig
    python benchmarks/verdicts.py --tools tools/bin/python        # minutes; without --tools only the rules of this file
    python benchmarks/verdicts.py --sweep runs/sweeps/NAME        # the seeds of each setting against each other

Two settings are trained with S seeds each and answer the same P problems. A seed moves the accuracy of its model by a
normal amount of `spread` points, the same distribution for both settings, so neither is better: every "better" or
"worse" is false. A verdict is false where the 95% interval leaves out 0, or p <= 0.05 where a tool decides by p. Kinds:

    plain      a problem is as hard for one setting as for the other
    suits      each setting suits some problems more (standard deviation of 15 points)
    saturated  accuracies near 0.95
    clusters   settings differ by subject, of which there are 4, 8 or 40 of one size (standard deviation of 3 points),
               and the rule knows the subject of each problem
    unknown    the same, but it does not

Called as their documentation says for data with seeds: evalstats with a column `run`; errorbars with the seeds as
samples of a question, which it averages; evalsig reads one run a side. They are made for two finished models, whose
problems are the only sample: there they are right (the rows with a spread of 0).

With a sweep, nothing is simulated: of each setting, some of its seeds are compared with others of the same setting.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from rlreason.runtime.statistics import Difference

Floats = NDArray[np.float64]
LEVEL = 0.05
SUITS, BY_SUBJECT = 0.15, 0.03


class Cell(NamedTuple):
    """One design: seeds a side, problems, spread of seeds in points, kind of problems, subjects."""

    seeds: int
    problems: int
    spread: float
    kind: str = "plain"
    subjects: int = 0

    @property
    def subject(self) -> list[int]:
        """Return the subject of each problem."""
        return [p % self.subjects for p in range(self.problems)]


GRID = [Cell(*of) for of in product((2, 3, 4, 6, 8), (256, 1319, 5000), (0.0, 1.0, 2.0, 3.5, 5.0))]
GRID += [Cell(s, 1319, x, kind) for kind in ("suits", "saturated") for s in (2, 4, 8) for x in (0.0, 2.0)]
GRID += [Cell(s, 1319, x, "clusters", k) for k in (4, 8, 40) for s in (2, 4, 8) for x in (0.0, 2.0)]
GRID += [Cell(s, 1319, 0.0, "unknown", 8) for s in (2, 4, 8)]
BESIDE = [Cell(s, 1319, x) for s in (2, 4, 8) for x in (0.0, 2.0, 5.0)]  # where the packages are asked too


def answers(rng: np.random.Generator, cell: Cell, *gains: float) -> list[Floats]:
    """Draw the answers (seeds, problems), 0 or 1, of a reference and of settings better by `gains` (0)."""
    base, sides = hardness(rng, cell), []
    for shift in (0.0, *(gains or [0.0])):
        right = base + shift
        if cell.kind == "suits":
            right = right + rng.normal(0, SUITS, cell.problems)
        if cell.subjects:
            right = right + rng.normal(0, BY_SUBJECT, cell.subjects)[cell.subject]
        of_seeds = rng.normal(0, cell.spread / 100, (cell.seeds, 1))
        sides.append((rng.random((cell.seeds, cell.problems)) < np.clip(right + of_seeds, 0, 1)).astype(np.float64))
    return sides


def hardness(rng: np.random.Generator, cell: Cell) -> Floats:
    """Draw how often each problem is answered right."""
    return rng.beta(19, 1, cell.problems) if cell.kind == "saturated" else rng.beta(2, 2, cell.problems)


def true_gain(rng: np.random.Generator, cell: Cell, gain: float, draws: int = 1_000_000) -> float:
    """Return what `gain` comes to in accuracy, which ends at 1."""
    right = hardness(rng, cell._replace(problems=draws)) + rng.normal(0, cell.spread / 100, draws)
    if cell.kind == "suits" or cell.subjects:
        right = right + rng.normal(0, BY_SUBJECT if cell.subjects else SUITS, draws)
    return float((np.clip(right + gain, 0, 1) - np.clip(right, 0, 1)).mean())


def interval_of(a: Floats, b: Floats, cell: Cell | None = None) -> tuple[float, float, float]:
    """Return (low, high, p) of b - a by this project's rule, by subject where they are known."""
    from rlreason.runtime.statistics import clustered, paired_difference

    found = paired_difference(b - a)
    if cell is not None and cell.kind == "clusters":
        found = clustered(found, dict(enumerate(b)), dict(enumerate(a)), cell.subject)
    return found.low, found.high, found.p


def t_test_p(d: Floats) -> float:
    """Return the p-value of the one-sample t-test that the mean of `d` is 0."""
    from scipy.stats import ttest_1samp

    return 1.0 if not d.any() else float(ttest_1samp(d, 0).pvalue)


#: Rule -> the p-value that it decides by.
RULES: dict[str, Callable[[Floats, Floats], float]] = {
    "rlreason (seeds and problems)": lambda a, b: interval_of(a, b)[2],
    "paired t-test over problems, seeds averaged": lambda a, b: t_test_p((b - a).mean(axis=0)),
    "paired t-test over problems, one run a side": lambda a, b: t_test_p((b - a)[0]),
}


def by_evalstats(a: Floats, b: Floats) -> float:
    """Compare two models whose seeds are runs."""
    import evalstats
    import pandas as pd

    rows = [(name, s, p, x) for name, of in (("a", a), ("b", b)) for (s, p), x in np.ndenumerate(of)]
    data = evalstats.load_from(pd.DataFrame(rows, columns=["model", "run", "item", "score"]))
    (pair,) = evalstats.compare(data, factors="model").to_dict()["pairwise"]
    return 0.0 if pair["significant"] else 1.0


def by_errorbars(a: Floats, b: Floats) -> float:
    """Compare two models by questions, whose samples are averaged."""
    from errorbars.compare import paired_compare

    return float(paired_compare(b.mean(axis=0), a.mean(axis=0)).p_value)


def by_evalsig(a: Floats, b: Floats) -> float:
    """Compare two runs; it reads the first epoch of each."""
    from evalsig import ItemResult, RunFrame, compare

    def frame(name: str, of: Floats) -> RunFrame:
        return RunFrame(name, name, "task", "accuracy", [ItemResult(str(p), x) for p, x in enumerate(of[0])])

    return float(compare(frame("a", a), frame("b", b)).p_value)


TOOLS = {"evalstats": by_evalstats, "errorbars": by_errorbars, "evalsig": by_evalsig}


def ask_tools(folder: Path) -> None:
    """In the tools' Python: judge every pair of `folder`, and print {tool with its version: p-values} as JSON."""
    import warnings
    from importlib.metadata import version

    warnings.simplefilter("ignore")
    pairs = [(of["a"].astype(np.float64), of["b"].astype(np.float64)) for of in map(np.load, sorted(folder.iterdir()))]
    found = {f"{name} {version(name)}": [judge(a, b) for a, b in pairs] for name, judge in TOOLS.items()}
    print(json.dumps(found))


def false_shares(cell: Cell, n: int, seed: int, tools: str | None) -> dict[str, float]:
    """Return {rule: share of `n` pairs of equal settings that it tells apart}."""
    rng = np.random.default_rng([seed, *map(int, cell[:2]), int(10 * cell.spread), len(cell.kind)])
    pairs = [answers(rng, cell) for _ in range(n)]
    p_values = {name: [rule(a, b) for a, b in pairs] for name, rule in RULES.items()}
    if tools:
        with tempfile.TemporaryDirectory() as folder:
            for k, (a, b) in enumerate(pairs):
                np.savez(f"{folder}/{k:05}.npz", a=a.astype(np.uint8), b=b.astype(np.uint8))
            asked = [tools, __file__, "--judge", folder]
            p_values |= json.loads(subprocess.run(asked, check=True, capture_output=True, text=True).stdout)
    return {name: float(np.mean(np.array(of) <= LEVEL)) for name, of in p_values.items()}


def covered(cell: Cell, n: int, seed: int, gain: float = 0.03) -> float:
    """Return the share of `n` pairs whose interval holds a difference that is known."""
    rng = np.random.default_rng([seed, 1, *map(int, cell[:2]), int(10 * cell.spread), len(cell.kind)])
    found, gain_in_accuracy = (
        [interval_of(*answers(rng, cell, gain), cell) for _ in range(n)],
        true_gain(rng, cell, gain),
    )
    return float(np.mean([low <= gain_in_accuracy <= high for low, high, _ in found]))


def by_halves(sweep: Path, n: int, seed: int) -> str:
    """Tell, of each setting of a sweep, how often seeds are told apart from other seeds of it, as Markdown.

    Each of `n` times, 2, 4 or 8 seeds a side are drawn. The draws share seeds, so that their share is less exact than
    as many pairs of the simulation.
    """
    from rlreason.report.read import read_study
    from rlreason.report.study import correctness, in_common

    study, rng = read_study([sweep]), np.random.default_rng(seed)
    right = correctness(study.settings, in_common(study.settings))
    lines = ["| setting | seeds a side | spread of seeds, points | " + " | ".join(RULES) + " |"]
    lines += ["| --- |" + " ---: |" * (len(RULES) + 2)]
    for setting, of in zip(study.settings, right, strict=True):
        x = np.stack(list(of.values()))
        spread = 100 * x.mean(axis=1).std(ddof=1)
        for size in [size for size in (2, 4, 8) if 2 * size <= len(x)]:
            draws = [x[rng.permutation(len(x))[: 2 * size]] for _ in range(n)]
            shares = [np.mean([rule(d[:size], d[size:]) <= LEVEL for d in draws]) for rule in RULES.values()]
            lines.append(
                f"| {setting.typed} | {size} | {spread:.1f} | " + " | ".join(f"{of:.1%}" for of in shares) + " |"
            )
    return "\n".join(lines)


def looked(sides: Sequence[Floats], most: int, within: float = 0.02) -> tuple[list["Difference"], list[bool], float]:
    """Add seeds by looks, as seed=auto max_seeds=MOST: return of each setting its difference from the first, and
    whether it is told apart; and the mean number of seeds.
    """
    from rlreason.runtime.looks import UNLIKELY, after_looks, chance, looks_of
    from rlreason.runtime.statistics import holm, paired_difference

    reference, *others = sides
    found, going, apart = (
        [paired_difference(other - reference) for other in others],
        {*range(len(others))},
        list[bool](),
    )
    for seeds in looks_of(most):
        for k in going:
            found[k] = after_looks(paired_difference((others[k] - reference)[:seeds]), most)
        apart = [p <= LEVEL for p in holm([one.p for one in found])]
        same = [-within < one.low and one.high < within for one in found]
        going = {k for k in going if not apart[k] and not same[k]}
        going = {k for k in going if chance(found[k], most, len(going), within) >= UNLIKELY}
        if not going:
            break
    return found, apart, (seeds + sum(one.seeds for one in found)) / len(sides)


def by_looks(cell: Cell, gains: Sequence[float], n: int, seed: int) -> tuple[float, float, float, float]:
    """Return of `n` designs with seeds added by looks, up to those of the cell: the shares that tell an equal setting
    apart, of intervals that hold the truth, and of better settings found; and the mean seeds of a setting.
    """
    rng = np.random.default_rng([seed, 3, *map(int, cell[:3]), len(gains), int(100 * max(gains))])
    truth = [true_gain(rng, cell, gain) if gain else 0.0 for gain in gains]
    of = list[tuple[float, ...]]()
    for _ in range(n):
        found, apart, seeds = looked(answers(rng, cell, *gains), cell.seeds)
        false = any(told for told, gain in zip(apart, gains, strict=True) if not gain)
        held = np.mean([one.low <= true <= one.high for one, true in zip(found, truth, strict=True)])
        better = [told for told, gain in zip(apart, gains, strict=True) if gain]
        of.append((float(false), float(held), float(np.mean(better or [False])), seeds))
    false, held, power, seeds = map(float, np.mean(of, axis=0))
    return false, held, power, seeds


def by_fixed(cell: Cell, gains: Sequence[float], n: int, seed: int) -> float:
    """Return the share of better settings that a fixed number of seeds tells apart."""
    from rlreason.runtime.statistics import holm

    rng = np.random.default_rng([seed, 4, *map(int, cell[:3]), len(gains), int(100 * max(gains))])
    shares = list[float]()
    for _ in range(n):
        reference, *others = answers(rng, cell, *gains)
        p = holm([interval_of(reference, other)[2] for other in others])
        shares += [float(one <= LEVEL) for one, gain in zip(p, gains, strict=True) if gain]
    return float(np.mean(shares))


def print_looks(n: int, seed: int) -> None:
    """Print how often looks are false, their coverage, and what they find and cost beside fixed numbers of seeds."""
    print("| max_seeds | problems | spread | settings | false | covered | seeds |\n" + "| ---: " * 7 + "|")
    false = list[float]()
    for most, problems, spread, settings in product((4, 6, 8), (256, 1319), (0.0, 2.0, 5.0), (1, 4)):
        share, held, _, seeds = by_looks(Cell(most, problems, spread), [0.0] * settings, n, seed)
        false.append(share)
        print(f"| {most} | {problems} | {spread:g} | {settings} | {share:.1%} | {held:.1%} | {seeds:.1f} |", flush=True)
    print(f"\nfalse in all: {np.mean(false):.1%}\n")
    print("| spread, points | better by | 3 seeds | 4 seeds | 8 seeds | seed=auto max_seeds=8 | its seeds | covered |")
    print("| ---: " * 8 + "|")
    for spread, gain in product((2.0, 5.0), (2, 5, 10)):
        gains = [gain / 100, 0.0, 0.0, 0.0]
        fixed = [f"{by_fixed(Cell(s, 1319, spread), gains, n, seed):.0%}" for s in (3, 4, 8)]
        _, held, power, seeds = by_looks(Cell(8, 1319, spread), gains, n, seed)
        print(f"| {spread:g} | {gain} | {' | '.join(fixed)} | {power:.0%} | {seeds:.1f} | {held:.1%} |", flush=True)


def table(rows: dict[Cell, dict[str, float]]) -> str:
    """Format the shares as Markdown, a row a rule and a column a design."""
    names = dict.fromkeys(name for row in rows.values() for name in row)
    lines = ["| false verdicts | " + " | ".join(f"{c.seeds} seeds, {c.spread:g} points" for c in rows) + " |"]
    lines += ["| --- |" + " ---: |" * len(rows)]
    for name in names:
        lines += [f"| {name} | " + " | ".join(f"{rows[c][name]:.0%}" if name in rows[c] else "" for c in rows) + " |"]
    return "\n".join(lines)


def draw(rows: dict[Cell, dict[str, float]], target: Path, seeds: int = 4) -> None:
    """Draw the shares against the spread of seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.2), layout="constrained")
    axes = figure.subplots()
    cells = [cell for cell in rows if cell.seeds == seeds]
    for name in rows[cells[0]]:
        ours = name.startswith("rlreason")
        axes.plot(
            [c.spread for c in cells], [100 * rows[c][name] for c in cells], "o-", lw=2.5 if ours else 1, label=name
        )
    axes.axhline(100 * LEVEL, color="0.6", lw=0.8, ls="--")
    axes.set_xlabel(f"standard deviation of seeds, accuracy points ({seeds} seeds a side, 1,319 problems)")
    axes.set_ylabel("false verdicts, %")
    axes.legend(frameon=False, fontsize=7)
    figure.savefig(target)


def main() -> None:
    """Print the table, and draw it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tools", metavar="PYTHON", help="a Python that has evalstats, errorbars and evalsig")
    parser.add_argument("--pairs", type=int, default=400, help="pairs of settings in a design (400)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--figure", type=Path, help="where the figure goes, SVG or PNG")
    parser.add_argument("--grid", action="store_true", help="this project's rule on the whole grid, and its coverage")
    parser.add_argument("--sweep", type=Path, help="a sweep's folder: compare seeds of its settings with each other")
    parser.add_argument("--looks", action="store_true", help="seed=auto: false verdicts, power and cost of its looks")
    parser.add_argument("--judge", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.judge:
        return ask_tools(asked.judge)
    if asked.sweep:
        return print(by_halves(asked.sweep, asked.pairs, asked.seed))
    if asked.looks:
        return print_looks(asked.pairs, asked.seed)
    rows = {cell: false_shares(cell, asked.pairs, asked.seed, asked.tools) for cell in BESIDE}
    print(table(rows))
    if asked.figure:
        draw(rows, asked.figure)
    if asked.grid:
        print(
            "\n| seeds | problems | spread | kind | subjects | false | a difference of 3 points is covered |\n"
            + "| --- " * 7
            + "|"
        )
        for cell in GRID:
            rng = np.random.default_rng([asked.seed, 2, *map(int, cell[:2]), int(10 * cell.spread), len(cell.kind)])
            false = np.mean([interval_of(*answers(rng, cell), cell)[2] <= LEVEL for _ in range(asked.pairs)])
            held = covered(cell, asked.pairs, asked.seed)
            print(f"| {' | '.join(map(str, cell))} | {false:.1%} | {held:.1%} |", flush=True)
    return None


if __name__ == "__main__":
    sys.exit(main())
