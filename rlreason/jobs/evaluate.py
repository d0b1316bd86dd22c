"""`algorithm=evaluate`: the accuracy of a model as it is, in the handout's three categories, every response kept."""

from pathlib import Path

from rlreason.config.jobs import Asking, Evaluate
from rlreason.console import Console
from rlreason.evaluation import in_words, more_accuracies
from rlreason.grading.saved import RunGrading
from rlreason.inspect.cases import case_text, reasons
from rlreason.jobs.respond import Responses, asked_problems, conclude, respond
from rlreason.jobs.store import WHOLE, enter, row_of
from rlreason.jobs.tables import by_facts, categories, category_table, fact_tables, figure_lines, ungraded
from rlreason.narration import asked_words, shown, tell_mirror
from rlreason.protocol import accuracy_words
from rlreason.setup.graders import grading_settings
from rlreason.setup.house import House, build

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
        console.say(figure_lines(responses.metrics, house.examiner.sampling.max_tokens, failed))
        for table in fact_tables(by_facts(responses.samples, responses.problems)):
            console.table("\n" + table)
        closing(console, house, responses, folder)
    finally:
        house.close()
    return responses.metrics["eval/accuracy"]


def announce(console: Console, run: Asking, house: House, folder: Path, again: bool) -> None:
    """What is about to be asked of whom, and how to go on after an interruption."""
    asks, count = house.examiner.settings, len(asked_problems(run, house))
    each = "one response each" if asks.samples == 1 else f"{asks.samples} responses each"
    sampling = f"T={asks.sampling.temperature:g}, up to {asks.sampling.max_tokens} tokens"
    console.say(f"model      {run.model.name}: {house.policy.describe()}; ready after {house.seconds_to_build:.0f} s")
    prompt = asked_words(run)
    console.say(f"asks       {count} {run.split} problems of {asks.data.name}, {each}; {prompt}; {sampling}")
    if house.examiner.beside is not None:
        console.say(f"counts     by {house.examiner.grader.reward}, and beside it by {house.examiner.beside.reward}")
    cure = "" if again else "; interrupted? the same command with hydra.run.dir=THAT_FOLDER goes on"
    console.say(f"records    {shown(folder)}{cure}")


def cases(console: Console, run: Asking, house: House, responses: Responses) -> None:
    """The first few responses, so that a wrong format or prompt is seen at once."""
    reward, n = house.examiner.grader.reward, house.examiner.settings.samples
    by_id, graded = {p.id: p for p in responses.problems}, RunGrading(reward, grading_settings(run.grading, reward))
    for number, sample in enumerate(responses.samples[::n][: run.log_generations], 1):
        row = row_of(sample, by_id[sample.group], 0)
        console.say("\n" + case_text(number, row, reasons(row, graded), SHOWN_CHARS))


def closing(console: Console, house: House, responses: Responses, folder: Path) -> None:
    m = responses.metrics
    for line in in_words(m["eval/accuracy"], more_accuracies(m, *house.examiner.rewards)):
        console.say(line)
    quoted = accuracy_words(m["eval/accuracy"], m["eval/accuracy_low"], m["eval/accuracy_high"], responses.protocol)
    console.say(f"{quoted}; {responses.tokens_per_second:.0f} tokens/s, {responses.seconds:.0f} s of sampling")
    console.say(f"\nall responses: {shown(folder / WHOLE)}; to read some: python -m rlreason.inspect {shown(folder)}")
    tell_mirror(console, house.mirror)
