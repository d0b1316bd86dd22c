"""Draw score.png: the best score against calls of the model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlreason.discovery.comparison import SeedGroup
from rlreason.discovery.log import Log, Record
from rlreason.records.training_curves import picture
from rlreason.report.content import LIGHT, evenly, written_out
from rlreason.runtime.intervals import best_of_curve, best_of_interval
from rlreason.runtime.text import shorten

POINTS = 120  # of the baseline
FEW = 5  # with fewer draws no interval is drawn


def draw(path: Path, title: str, settings: Sequence[SeedGroup]) -> None:
    """Draw the picture. Records within its range get a line."""
    logs = [log for setting in settings for log in setting.logs]
    longest = max(1, *(log.calls for log in logs))
    with picture(path, shorten(written_out(title), 90), (8.5, 5)) as ax:
        for place, setting in enumerate(settings):
            if setting.draws not in [one.draws for one in settings[:place]]:
                _draw_baseline(ax, setting, longest)
            _draw_setting(ax, setting, LIGHT[f"s{1 + place % 7}"])
        if len(logs) == 1:
            _draw_replies(ax, logs[0])
        _draw_record(ax, logs[0].record)
        ax.set_xlabel("calls of the model (requests, retries counted)")
        ax.set_ylabel(f"best score so far ({shorten(written_out(logs[0].unit), 40)})")
        ax.xaxis.get_major_locator().set_params(integer=True)
        ax.set_xlim(0, longest * 1.02)
        ax.grid(alpha=0.25)
        ax.legend(loc="upper left", bbox_to_anchor=(0, -0.12), fontsize=8, frameon=False, handlelength=4)


def _draw_baseline(ax: Any, setting: SeedGroup, longest: int) -> None:
    """Draw the expected best of k draws, from 0 calls on, as far as there are draws and calls to compare with."""
    draws, reach = setting.draws, min(len(setting.draws), longest)
    if reach < 2:
        return
    ks = [1 + int(k) for k in evenly(reach, POINTS)]
    start, xs = setting.logs[0].start["score"], [0, *ks]
    name = shorten(written_out(f"independent draws: expected best of {len(draws)} ({setting.label})"), 110)
    style = {"color": LIGHT["s0"], "linewidth": 1.6, "linestyle": (0, (4, 2))}
    ax.plot(xs, [start, *best_of_curve(draws, ks)], label=name, **style)
    if len(draws) >= FEW:
        low, high = best_of_interval(draws, ks)
        ax.fill_between(xs, [start, *low], [start, *high], color=LIGHT["s0"], alpha=0.13, linewidth=0)


def _draw_setting(ax: Any, setting: SeedGroup, colour: str) -> None:
    """Draw a thin line per run, and the median of the seeds over the calls that all ended ones made."""
    for log in setting.logs:
        ax.step(*log.curve(), where="post", color=colour, linewidth=0.9, alpha=0.4)
    calls = range(1 + min(log.calls for log in setting.ended))
    middle = [np.median([log.best_at(made) for log in setting.ended]) for made in calls]
    of = f"median of {len(setting.ended)} runs; thin: each run" if len(setting.logs) > 1 else "one run"
    name = shorten(written_out(f"{setting.label} ({of})"), 110)
    ax.step(calls, middle, where="post", color=colour, linewidth=2.4, label=name)


def _draw_replies(ax: Any, log: Log) -> None:
    """Draw each reply of a single run: a dot at the score of a valid set, a cross at 0 for any other."""
    replies = [(x, turn) for x, turn in zip(log.curve()[0][1:], log.turns, strict=True) if turn.reply]
    for is_valid, mark, colour, name in ((True, "o", "s1", "a valid set"), (False, "x", "s5", "none")):
        if marks := [(x, turn.credit) for x, turn in replies if turn.is_valid is is_valid]:
            colour, name = LIGHT[colour], f"a reply with {name}"
            ax.plot(*zip(*marks, strict=True), mark, color=colour, markersize=5, clip_on=False, label=name)


def _draw_record(ax: Any, record: Sequence[Record]) -> None:
    """Draw a line for each record within the range, which is extended to the next one above if that is near."""
    best = max(1.0, ax.dataLim.y1)
    above = min((one.score for one in record if best < one.score <= 1.5 * best), default=0)
    top, height = max(1.08 * best, 1.04 * above), 0.0
    ax.set_ylim(0, top)
    for one in sorted((one for one in record if 0 < one.score <= top), key=lambda one: one.score):
        ax.axhline(one.score, color=LIGHT["axis"], linewidth=0.8, linestyle=(0, (1, 2)), zorder=0)
        height = max(height + 0.038 * top, one.score)  # labels do not cover each other
        name = shorten(written_out(f"{one.score:g} {one.who}"), 30)
        ax.text(1.01, height, name, transform=ax.get_yaxis_transform(), fontsize=7, va="center", color=LIGHT["muted"])
