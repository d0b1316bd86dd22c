"""The loss laboratory: `rlreason inspect RUN --gradients [--step N]`.

Compares every named objective with a run's own, on the run's saved responses and final policy: loss, gradient, clipping
and the weight of each token. Where no model was saved, the one that the run started from takes its place. Nothing is
sampled again. Leaves RUN/lab/step_NNNNN.json and step_NNNNN.png.
"""

from rlreason.analysis.saved_run import read_run, read_step
from rlreason.config.store import register
from rlreason.records.console import Console
from rlreason.records.reader import RunFolder
from rlreason.runtime.streams import folded
from rlreason.runtime.verb import Answer


def compare_gradients(folder: RunFolder, step: int | None, console: Console) -> Answer:
    """The objectives side by side on one step's rollouts, by default the last saved step's."""
    register()
    run = read_run(folder)
    step, samples = read_step(folder, run, step)
    with console.wait("loading torch and transformers"):  # after what can be mistaken
        from rlreason.analysis.gradient_report import draw, figures, table, write_figures
        from rlreason.analysis.gradients import laboratory
    with console.wait("comparing the objectives"):
        result = laboratory(folder, run, step, samples, console)
    with console.wait("drawing"):
        numbers, picture = write_figures(folder.path, result), draw(folder.path, result)
    files = folded(f"picture: {picture}, numbers: {numbers}", console.width)
    found = {"run": folder.path, **figures(result), "picture": picture, "numbers": numbers}
    return Answer(f"{table(result)}\n\n{files}", found)
