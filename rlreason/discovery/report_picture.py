"""Draw score.png: the best score against calls of the model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlreason.discovery.comparison import Panel, SeedGroup
from rlreason.discovery.log import Log, Record
from rlreason.records.training_curves import picture
from rlreason.report.content import LIGHT, evenly, written_out
from rlreason.runtime.text import shorten

MOST_PANELS = 4  # kinds of draws side by side; others are left to the text
MOST_LINES = 200  # of single runs in one panel
POINTS = 120  # of the baseline
STYLES = ("-", "--", "-.", ":")


def draw(path: Path, title: str, unit: str, panels: Sequence[Panel], record: Sequence[Record]) -> None:
    """Draw the picture, a part for each kind of draws. Records within its range get a line."""
    panels = panels[:MOST_PANELS]
    settings = [setting for panel in panels for setting in panel.settings]
    with picture(path, label(title, 90), (8.5, 1.6 + 3.4 * len(panels)), rows=len(panels)) as axes:
        from matplotlib.ticker import MaxNLocator

        every = list(np.atleast_1d(axes))
        for ax, panel in zip(every, panels, strict=True):
            _draw_baseline(ax, panel)
            for setting in panel.settings:
                place = settings.index(setting)
                _draw_setting(ax, setting, LIGHT[f"s{1 + place % 7}"], STYLES[place % len(STYLES)])
            if len(settings) == len(settings[0].logs) == 1:
                _draw_programs(ax, settings[0].logs[0])
            _draw_record(ax, record)
            ax.set_xlabel("calls of the model (requests, retries counted)")
            ax.set_ylabel(label(f"best score so far ({unit})", 60))
            ax.xaxis.set_major_locator(MaxNLocator(integer=True))
            ax.set_xlim(0, max(1, panel.longest) * 1.02)
            ax.grid(alpha=0.25)
            ax.set_title(label(panel.title, 110), fontsize=8, loc="left", color="0.3")
        names: dict[str, Any] = {}
        for ax in every:
            handles, labels = ax.get_legend_handles_labels()
            names |= dict(zip(labels, handles, strict=True))
        every[0].figure.legend(
            names.values(), names, loc="outside lower left", fontsize=8, frameon=False, handlelength=4
        )


def label(text: str, most: int) -> str:
    """Return a foreign text as a picture can show it: on one line, cut, without control characters."""
    return shorten(written_out(text), most)


def _draw_baseline(ax: Any, panel: Panel) -> None:
    """Draw the expected best of k draws, from 0 calls on, as far as there are draws and calls to compare with."""
    count = len(panel.draws)
    reach = min(count, panel.longest)
    if reach < 2:
        return
    ks = [1 + int(k) for k in evenly(reach, POINTS)]
    start, xs = panel.settings[0].logs[0].start.score, [0, *ks]
    name = f"independent draws: expected best of {count}, without a band: they are few"
    if bounds := panel.interval(ks):
        low, high = bounds
        ax.fill_between(xs, [start, *low], [start, *high], color=LIGHT["s0"], alpha=0.13, linewidth=0)
        name = f"independent draws: expected best (band: 95% bootstrap interval, {count} draws)"
    ax.plot(xs, [start, *panel.expected(ks)], color=LIGHT["s0"], linewidth=1.6, linestyle=(0, (4, 2)), label=name)


def _draw_setting(ax: Any, setting: SeedGroup, colour: str, style: str) -> None:
    """Draw a thin line per run, and the median of the seeds over the calls that all ended ones made."""
    many = len(setting.logs) > 1
    thin: dict[str, Any] = {"linewidth": 0.9, "alpha": 0.4} if many else {"linewidth": 2.2, "linestyle": style}
    for log in setting.logs[:MOST_LINES]:
        name = None if many else label(f"{setting.label} (one run)", 110)
        ax.step(*log.curve(), where="post", color=colour, label=name, **thin)
    if many:
        ended = setting.ended
        calls = range(1 + min(log.calls for log in ended))
        curves = [tuple(map(np.asarray, log.curve())) for log in ended]
        middle = np.median([best[np.searchsorted(made, calls, "right") - 1] for made, best in curves], axis=0)
        name = label(f"{setting.label} (median of {len(ended)} runs; thin: each run)", 110)
        ax.step(calls, middle, where="post", color=colour, linewidth=2.4, label=name, linestyle=style)


def _draw_programs(ax: Any, log: Log) -> None:
    """Draw each reply of a single run: a dot at the score of a valid set, a cross at 0 for any other."""
    calls, _ = log.curve()
    for is_valid, mark, colour, name in ((True, "o", "s1", "a valid set"), (False, "x", "s5", "none")):
        turns = [(x, t.credit) for x, t in zip(calls[1:], log.turns, strict=True) if t.reply and t.is_valid is is_valid]
        if turns:
            xs, ys = zip(*turns, strict=True)
            ax.plot(xs, ys, mark, color=LIGHT[colour], markersize=5, clip_on=False, label=f"a reply with {name}")


def _draw_record(ax: Any, record: Sequence[Record]) -> None:
    """Draw a line for each record within the range, which is extended to the next one above if that is near."""
    best = max(1.0, ax.dataLim.y1)
    above = min((one.score for one in record if best < one.score <= 1.5 * best), default=0)
    top = max(1.08 * best, 1.04 * above)
    ax.set_ylim(0, top)
    height = 0.0
    for one in sorted((one for one in record if 0 < one.score <= top), key=lambda one: one.score):
        ax.axhline(one.score, color=LIGHT["axis"], linewidth=0.8, linestyle=(0, (1, 2)), zorder=0)
        height = max(height + 0.038 * top, one.score)  # labels do not cover each other
        name = label(f"{one.score:g} {one.who}", 30)
        ax.text(1.01, height, name, transform=ax.get_yaxis_transform(), fontsize=7, va="center", color=LIGHT["muted"])
