"""Draw score.png: the best score against calls of the model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlreason.discovery.logs import ORDER, Log, Panel, SeedGroup
from rlreason.records.training_curves import picture
from rlreason.report.content import LIGHT, evenly, written_out
from rlreason.runtime.text import shorten

MOST_PANELS = 4  # kinds of draws side by side; others are left to the text
MOST_LINES = 200  # of single runs in one panel
POINTS = 120  # of the baseline
LABELS_APART = 0.038  # of the height: how far labels of records are from one another at least
MOST_RECORDS = 12  # with a label, the highest ones
STYLES = ("-", "--", "-.", ":")


def draw(path: Path, title: str, unit: str, panels: Sequence[Panel], record: Sequence[tuple[float, str]]) -> None:
    """Draw the picture. `record`: (score, who) of what others reached; those within the range get a line."""
    panels = panels[:MOST_PANELS]
    colours = colours_of([setting for panel in panels for setting in panel.settings])
    with picture(path, label(title, 90), (8.5, 1.6 + 3.4 * len(panels)), rows=len(panels)) as axes:
        from matplotlib.ticker import MaxNLocator

        every = list(np.atleast_1d(axes))
        for ax, panel in zip(every, panels, strict=True):
            _draw_baseline(ax, panel)
            for setting in panel.settings:
                _draw_setting(ax, setting, *colours[setting.label])
            if len(panels) == 1 and len(panel.settings) == 1 and len(panel.settings[0].logs) == 1:
                _draw_programs(ax, panel.settings[0].logs[0], colours[panel.settings[0].label][0])
            _draw_record(ax, panel, record)
            ax.set_xlabel("calls of the model (requests, retries counted)")
            ax.set_ylabel(label(f"best score so far ({unit})", 60))
            ax.xaxis.set_major_locator(MaxNLocator(integer=True))
            ax.set_xlim(0, max(1, panel.longest) * 1.02)
            ax.grid(alpha=0.25)
            ax.set_title(label(panel.title, 110), fontsize=8, loc="left", color="0.3")
        _legend(every)


def label(text: str, most: int) -> str:
    """Return a foreign text as a picture can show it: on one line, cut, without control characters."""
    return shorten(written_out(text), most)


def colours_of(settings: Sequence[SeedGroup]) -> dict[str, tuple[str, str]]:
    """Return label -> (colour, line style): a strategy has its own if no two settings share it."""
    strategies = [setting.strategy for setting in settings]
    own = len(set(strategies)) == len(strategies) and set(strategies) <= set(ORDER)
    places = [ORDER.index(one) if own else k for k, one in enumerate(strategies)]
    names = [f"s{1 + place}" if place < 7 else "rest" for place in places]
    return {
        setting.label: (LIGHT[name], STYLES[k % len(STYLES)])
        for k, (setting, name) in enumerate(zip(settings, names, strict=True))
    }


def _draw_baseline(ax: Any, panel: Panel) -> None:
    """Draw the expected best of k draws, from 0 calls on, as far as there are draws and calls to compare with."""
    reach = min(panel.count, panel.longest)
    if reach < 2:
        return
    ks = [1 + int(k) for k in evenly(reach, POINTS)]
    start, xs, count = panel.start, [0, *ks], panel.count
    name = f"independent draws: expected best of {count}, without a band: they are few"
    if bounds := panel.interval(ks):
        low, high = bounds
        ax.fill_between(xs, [start, *low], [start, *high], color=LIGHT["s0"], alpha=0.13, linewidth=0)
        name = f"independent draws: expected best (band: 95% bootstrap interval, {count} draws)"
    ax.plot(xs, [start, *panel.expected(ks)], color=LIGHT["s0"], linewidth=1.6, linestyle=(0, (4, 2)), label=name)


def _draw_setting(ax: Any, setting: SeedGroup, colour: str, style: str) -> None:
    """Draw a thin line per run, and the median of the seeds over the calls that all ended ones made."""
    logs, many = setting.logs, len(setting.logs) > 1
    for log in logs[:MOST_LINES]:
        xs, ys = log.curve()
        width, alpha = (0.9, 0.4) if many else (2.2, 1.0)
        name = None if many else f"{setting.label} (one run)"
        line = "-" if many else style
        ax.step(xs, ys, where="post", color=colour, linewidth=width, alpha=alpha, label=name, linestyle=line)
    if many:
        calls = list(range(1 + min(log.calls for log in setting.ended)))
        middle = np.median([_at_each(log, calls) for log in setting.ended], axis=0)
        name = f"{setting.label} (median of {len(setting.ended)} runs; thin: each run)"
        ax.step(calls, middle, where="post", color=colour, linewidth=2.4, label=name, linestyle=style)


def _at_each(log: Log, calls: Sequence[int]) -> list[int]:
    xs, ys = log.curve()
    return [ys[int(np.searchsorted(xs, at, "right")) - 1] for at in calls]


def _draw_programs(ax: Any, log: Log, colour: str) -> None:
    """Draw each reply of a single run: a dot at the score of a valid set, a cross at 0 for any other."""
    xs, _ = log.curve()
    at = [(x, turn.credit, turn.is_valid) for x, turn in zip(xs[1:], log.turns, strict=True) if turn.reply is not None]
    valid, other = [(x, y) for x, y, ok in at if ok], [(x, y) for x, y, ok in at if not ok]
    if valid:
        ax.plot(*zip(*valid, strict=True), "o", color=colour, markersize=4.5, label="a reply with a valid set")
    if other:
        ax.plot(
            *zip(*other, strict=True), "x", color=LIGHT["s5"], markersize=5, clip_on=False, label="a reply without one"
        )


def _draw_record(ax: Any, panel: Panel, record: Sequence[tuple[float, str]]) -> None:
    """Draw a line for each record within the range, extended to the next one above if that is near."""
    best = float(max(1, *(max(log.curve()[1]) for log in panel.logs)))
    if panel.count:
        best = max(best, *panel.expected([panel.count]))
    above = sorted(score for score, _ in record if best < score <= 1.5 * best)
    top = max(1.08 * best, 1.04 * above[0] if above else 0)
    visible = sorted((score, who) for score, who in record if 0 < score <= top)
    if visible:
        top = max(top, 1.03 * visible[-1][0])
    ax.set_ylim(0, top)
    for score, _ in visible:
        ax.axhline(score, color=LIGHT["axis"], linewidth=0.8, linestyle=(0, (1, 2)), zorder=0)
    named = visible[-MOST_RECORDS:]
    for (score, who), height in zip(named, spread([score for score, _ in named], top * LABELS_APART), strict=True):
        text = label(f"{score:g} {who}", 30)
        ax.text(1.01, height, text, transform=ax.get_yaxis_transform(), fontsize=7, va="center", color=LIGHT["muted"])


def spread(heights: Sequence[float], gap: float) -> list[float]:
    """Move rising heights apart to at least `gap`, each cluster around its middle.

    >>> spread([0, 50, 51, 100], 10)
    [0.0, 45.5, 55.5, 100.0]
    """
    groups: list[list[float]] = []
    for height in heights:
        groups.append([height])
        while len(groups) > 1 and _bottom(groups[-1], gap) < _bottom(groups[-2], gap) + gap * len(groups[-2]):
            last = groups.pop()
            groups[-1] += last
    return [_bottom(group, gap) + gap * k for group in groups for k in range(len(group))]


def _bottom(group: Sequence[float], gap: float) -> float:
    return sum(group) / len(group) - gap * (len(group) - 1) / 2


def _legend(every: Sequence[Any]) -> None:
    """Draw one legend below all panels: an entry for each name."""
    entries: dict[str, Any] = {}
    for ax in every:
        for handle, name in zip(*ax.get_legend_handles_labels(), strict=True):
            entries.setdefault(label(name, 110), handle)
    every[0].figure.legend(
        list(entries.values()), list(entries), loc="outside lower left", fontsize=8, frameon=False, handlelength=4
    )
