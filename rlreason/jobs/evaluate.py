"""`algorithm=evaluate`: the accuracy of a model as it is, in the handout's three categories, every response kept."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlreason.config.jobs import EvalJobConfig, EvaluateConfig
from rlreason.evaluation.accuracy import describe_accuracies, more_accuracies
from rlreason.evaluation.cases import case_text, reasons
from rlreason.evaluation.protocol import format_accuracy
from rlreason.evaluation.tables import by_facts, categories, category_table, fact_tables, figure_lines, ungraded
from rlreason.jobs.respond import Responses, asked_problems, conclude, respond
from rlreason.records.console import Console
from rlreason.records.files import RESPONSES
from rlreason.records.rows import numbered_row
from rlreason.records.writer import RunWriter
from rlreason.setup.components import Components, build_components
from rlreason.setup.origin import facts_of
from rlreason.setup.run_summary import describe_job, show_loggers, shown

SHOWN_CHARS = 400  # of a response in the terminal


def evaluate_model(run: EvaluateConfig, records: RunWriter, console: Console) -> float:
    """Ask, grade, count; returns the accuracy."""
    with asked(run, records, console) as (components, responses):
        rows, failed = categories(responses.samples, responses.problems), ungraded(responses.samples)
        conclude(records, components, responses, {"categories": rows, "ungraded": failed})
        cases(console, run, components, responses)
        console.table("\n" + category_table(rows))
        console.say(figure_lines(responses.metrics, components.evaluator.sampling.max_tokens, failed))
        for table in fact_tables(by_facts(responses.samples, responses.problems)):
            console.table("\n" + table)
        closing(console, components, responses, records.folder)
    return responses.metrics["eval/accuracy"]


@contextmanager
def asked(run: EvalJobConfig, records: RunWriter, console: Console) -> Iterator[tuple[Components, Responses]]:
    """(components, responses) of a job, which goes on with what an interrupted one left in the folder."""
    components = build_components(run, records.folder, console, clock=records.clock)
    records.loggers = components.loggers
    try:
        records.add_provenance(facts_of(run, components))
        announce(console, run, components, records.folder, records.resumed)
        yield components, respond(run, components, records, console)
    except KeyboardInterrupt:
        components.loggers.interrupted()
        show_loggers(console, components.loggers)
        raise
    finally:
        components.close()
        components.loggers.abandon()  # where nothing has ended them, the job failed


def announce(console: Console, run: EvalJobConfig, components: Components, folder: Path, again: bool) -> None:
    """What is about to be asked of whom, and how to go on after an interruption."""
    asks, count = components.evaluator.settings, len(asked_problems(run, components))
    each = "one response each" if asks.samples == 1 else f"{asks.samples} responses each"
    console.say(
        f"model      {run.model.name}: {components.policy.describe()}; ready after {components.seconds_to_build:.0f} s"
    )
    prompt = describe_job(run)
    console.say(
        f"asks       {count} {run.split} problems of {asks.data.name}, {each}; {prompt}; {asks.sampling.describe()}"
    )
    counts, second = components.evaluator.rewards
    if second is not None:
        console.say(f"counts     by {counts}, and for comparison by {second}")
    cure = "" if again else "; interrupted? the same command with hydra.run.dir=THAT_FOLDER goes on"
    console.say(f"records    {shown(folder)}{cure}")


def cases(console: Console, run: EvalJobConfig, components: Components, responses: Responses) -> None:
    """The first few responses, so that a wrong format or prompt is seen at once."""
    grader = components.evaluator.grader
    by_id = {p.id: p for p in responses.problems}
    for number, sample in enumerate(responses.shown, 1):
        row = numbered_row(sample, by_id[sample.group], 0)
        console.say("\n" + case_text(number, row, reasons(row, grader), SHOWN_CHARS))


def closing(console: Console, components: Components, responses: Responses, folder: Path) -> None:
    """The accuracies as they are to be quoted, and where the responses are."""
    m = responses.metrics
    for line in describe_accuracies(m["eval/accuracy"], more_accuracies(m, *components.evaluator.rewards)):
        console.say(line)
    figures = (m["eval/accuracy"], m["eval/accuracy_low"], m["eval/accuracy_high"])
    quoted = format_accuracy(*figures, responses.protocol, m.get("eval/questions"))
    console.say(f"{quoted}; {responses.tokens_per_second:.0f} tokens/s, {responses.seconds:.0f} s of sampling")
    console.say(
        f"\nall responses: {shown(folder / RESPONSES)}; to read some: python -m rlreason inspect {shown(folder)}"
    )
    show_loggers(console, components.loggers)
