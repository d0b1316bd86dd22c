"""Curves against N with their bands."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from rlreason.runtime.atomic_files import whole

Points = Sequence[Sequence[float]]  # (value, low, high) for each N

MARKERS = "osD^vP"


def draw_best_of_n(
    path: Path, runs: Mapping[str, tuple[Sequence[int], Mapping[str, Points]]], title: str, subtitle: str
) -> None:
    """One line per run and way to choose; with several runs, colours tell the ways apart and line styles the runs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import NullFormatter, NullLocator

    fig, ax = plt.subplots(figsize=(8, 5), constrained_layout=True)
    ways = list(dict.fromkeys(way for _, curves in runs.values() for way in curves))
    for (run, (n_list, curves)), style in zip(runs.items(), ("-", "--", ":", "-.") * len(runs), strict=False):
        for way, points in curves.items():
            place = ways.index(way)
            values, low, high = zip(*points, strict=True)
            label = f"{run}: {way}" if run else way
            ax.plot(n_list, values, style, color=f"C{place}", marker=MARKERS[place % 6], markersize=5, label=label)
            ax.fill_between(n_list, low, high, color=f"C{place}", alpha=0.12, linewidth=0)
    ticks = sorted({n for n_list, _ in runs.values() for n in n_list})
    ax.set_xscale("log", base=2)
    ax.set_xticks(ticks, [str(n) for n in ticks])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.set_xlabel("N, responses to choose from")
    ax.set_ylabel("share of problems solved")
    ax.set_ylim(bottom=0)
    ax.grid(alpha=0.25)
    ax.legend(fontsize=8, frameon=False, loc="upper left")
    fig.suptitle(title, fontsize=11, x=0.01, ha="left")
    ax.set_title(subtitle, fontsize=8, loc="left", color="0.4")
    with whole(path) as partial:
        fig.savefig(partial, dpi=130, format=path.suffix[1:] or "png")
    plt.close(fig)
