"""`algorithm=evaluate`: the accuracy of a model as it is, in the handout's three categories, every response kept."""

from pathlib import Path

from rlreason.config.jobs import Asking, Evaluate
from rlreason.console import Console
from rlreason.grading.saved import RunGrading
from rlreason.inspect.cases import case_text, reasons
from rlreason.jobs.respond import Responses, conclude, respond
from rlreason.jobs.store import WHOLE, enter, row_of
from rlreason.jobs.tables import categories, category_table, figure_lines, ungraded
from rlreason.narration import prompt_words, shown, tell_mirror
from rlreason.protocol import accuracy_words
from rlreason.setup.house import House, build, grading_settings

SHOWN_CHARS = 400  # of a response in the terminal


def evaluate_model(run: Evaluate, folder: Path, config: str) -> float:
    """Ask, grade, count; returns the accuracy."""
    console = Console()
    again = enter(folder, config, console.say)
    house = build(run, folder, console)
    try:
        announce(console, run, house, folder, again)
        responses, store = respond(run, house, folder, console)
        rows, failed = categories(responses.samples), ungraded(responses.samples)
        conclude(folder, house, responses, store, {"categories": rows, "ungraded": failed})
        cases(console, run, house, responses)
        console.table("\n" + category_table(rows))
        console.say(figure_lines(responses.metrics, run.sampling.max_tokens, failed))
        closing(console, house, responses, folder)
    finally:
        house.close()
    return responses.metrics["eval/accuracy"]


def announce(console: Console, run: Asking, house: House, folder: Path, again: bool) -> None:
    """What is about to be asked of whom, and how to go on after an interruption."""
    count = len(house.train_problems[: run.eval_problems] if run.split == "train" else house.final_problems)
    each = "one response each" if run.responses == 1 else f"{run.responses} responses each"
    sampling = f"T={run.sampling.temperature:g}, up to {run.sampling.max_tokens} tokens"
    console.say(f"model      {run.model.name}: {house.policy.describe()}; ready after {house.seconds_to_build:.0f} s")
    console.say(f"asks       {count} {run.split} problems of {run.data.name}, {each}; {prompt_words(run)}; {sampling}")
    cure = "" if again else "; interrupted? the same command with hydra.run.dir=THAT_FOLDER goes on"
    console.say(f"records    {shown(folder)}{cure}")


def cases(console: Console, run: Asking, house: House, responses: Responses) -> None:
    """The first few responses, so that a wrong format or prompt is seen at once."""
    by_id, graded = {p.id: p for p in responses.problems}, RunGrading(house.grader.reward, grading_settings(run))
    for number, sample in enumerate(responses.samples[:: run.responses][: run.log_generations], 1):
        row = row_of(sample, by_id[sample.group], 0)
        console.say("\n" + case_text(number, row, reasons(row, graded), SHOWN_CHARS))


def closing(console: Console, house: House, responses: Responses, folder: Path) -> None:
    m = responses.metrics
    quoted = accuracy_words(m["eval/accuracy"], m["eval/accuracy_low"], m["eval/accuracy_high"], responses.protocol)
    console.say(f"{quoted}; {responses.tokens_per_second:.0f} tokens/s, {responses.seconds:.0f} s of sampling")
    console.say(f"\nall responses: {shown(folder / WHOLE)}; to read some: python -m rlreason.inspect {shown(folder)}")
    tell_mirror(console, house.mirror)
