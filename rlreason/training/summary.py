"""Say what a run will do and how it ended: printed lines, its summary, its facts."""

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import yaml

from rlreason.config.groups import RULES, WEIGHTS, PromptConfig
from rlreason.config.leaves import leaves, resource_dir
from rlreason.config.run import RunConfig
from rlreason.config.training import TrainingConfig
from rlreason.engines.base import Sampling, Stops
from rlreason.engines.vllm.engine import VLLMEngine
from rlreason.engines.vllm.start import sampling_arguments
from rlreason.evaluation.accuracy import describe_accuracies, more_accuracies
from rlreason.evaluation.evaluator import Evaluated, protocol_of
from rlreason.evaluation.protocol import format_accuracy
from rlreason.health.watch import Monitors
from rlreason.model.chat import prompt_facts
from rlreason.model.parameters import model_size
from rlreason.model.policy import Policy, weights_hash
from rlreason.records.console import Console, closing_table
from rlreason.records.files import COMPLIANCE, CURVES, EVALS, MODEL, step_name
from rlreason.records.loggers import Loggers
from rlreason.records.reader import time_line, time_summary
from rlreason.records.rows import Counters
from rlreason.records.writer import RunWriter
from rlreason.runtime.machine import SWEEP_VARIABLE
from rlreason.runtime.text import redacted, shorten, size
from rlreason.training.build import Components
from rlreason.types import Problem, Sample

SHOWN_CHARS = 300  # of a question or a response
LOST = f"diverged:{WEIGHTS}"  # the status of a run whose weights are not finite


def print_header(console: Console, run: TrainingConfig, components: Components, folder: Path, n_steps: int) -> None:
    """Print what will be trained, on what data, and where the records go."""
    console.say(
        f"model      {run.model.name}: {components.policy.describe()}; ready after {components.seconds_to_build:.0f} s"
    )
    if run.rollout.engine == "vllm":  # which rollout=auto may have chosen
        console.say("engine     vLLM (rollout=hf samples in this process)")
    validate, last = len(components.eval_problems), len(components.final_problems)
    sizes = f"{len(components.train_problems)} to train on, {validate} to validate on the way, {last} at the end"
    console.say(f"data       {run.data.name}: {sizes}; {describe_prompt(run.prompt, run.reads_traces)}")
    for line in evaluated_otherwise(run, components):
        console.say(line)
    console.say(f"batch      {run.describe_batch(n_steps)}, learning rate {run.learning_rate:g}")
    console.say(f"records    {short_path(folder)}")


def describe_prompt(prompt: PromptConfig, traces: bool, key: str = "prompt") -> str:
    """Describe the prompt's option and the settings that differ from it, its trace only if `traces` are read.

    `key`: where these settings are, `prompt` or `eval.prompt`.
    """
    path = resource_dir("conf") / "prompt" / f"{prompt.name}.yaml"
    shipped = yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else {}
    chat = ("system", "enable_thinking") if prompt.chat else ()
    names = ("file", *chat, "reward", "stop", *(["trace"] if traces else []))
    used = {name: getattr(prompt, name) for name in names}
    own = [f"{key}.{name}={shorten(str(value), 60)}" for name, value in used.items() if value != shipped.get(name)]
    return f"prompt={prompt.name} with {', '.join(own)}" if own else f"prompt={prompt.name}"


def describe_job(run: RunConfig) -> str:
    """Describe the prompt of evaluations."""
    key = "prompt" if run.eval.prompt is None else "eval.prompt"
    return describe_prompt(run.evaluation.prompt, traces=False, key=key)


def evaluated_otherwise(run: TrainingConfig, components: Components) -> list[str]:
    """Describe how evaluations differ from training, if they do."""
    asks, second = components.evaluator.settings, components.evaluator.second_grader
    parts = []
    if asks.data is not run.data:
        parts.append(f"data={asks.data.name}")
    if asks.prompt is not run.prompt:
        parts.append(describe_job(run))
    if asks.sampling != run.sampling:
        parts.append(asks.sampling.describe())
    if asks.samples > 1:
        parts.append(f"{asks.samples} responses per problem")
    lines = [f"evaluates  with {'; '.join(parts)}"] if parts else []
    if second is not None:
        lines.append(f"counts     by {components.evaluator.grader.reward}, and for comparison by {second.reward}")
    return lines


def print_generations(console: Console, samples: Sequence[Sample], problems: Sequence[Problem], count: int) -> None:
    """Print an evaluation's first responses, so that a wrong format or prompt shows before hours are spent."""
    by_id = {p.id: p for p in problems}
    if count:
        console.say(f"\nThe first responses, before training (all of them: {EVALS}/{step_name(0)}):")
    for s in samples[:count]:
        problem = by_id[s.group]
        console.say(f"  {shorten(problem.question, SHOWN_CHARS)}   (answer: {problem.answer})")
        entropy = "" if s.entropy is None else f", entropy {s.entropy:.2f}"
        graded = f"[{s.grade.outcome}, {len(s.response.token_ids)} tokens{entropy}]"
        console.say(f"    {shorten(s.response.text, SHOWN_CHARS)}   {graded}")


def short_path(folder: Path) -> str:
    """Return the path relative to the current folder if it is inside, otherwise unchanged."""
    return str(folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder)


def print_loggers(console: Console, loggers: Loggers) -> None:
    """Print where the run is in each logging service, or why it is not there."""
    for name, place in loggers.places.items():
        console.say(f"logger     {name}: {place}")


def run_summary(
    components: Components, history: Sequence[Evaluated], monitors: Monitors, counters: Counters, lost: bool
) -> dict[str, Any]:
    """Return the run's results and its course: notices, counters, and where the time went.

    `accuracy` is that of the last evaluation, over the whole split if it was evaluated; NaN if the weights are `lost`.
    """
    before, after = history[0], history[-1]
    evaluator, tokenizer = components.evaluator, components.policy.tokenizer
    return {
        "accuracy_before": before.metrics["eval/accuracy"],
        "accuracy_after": math.nan if lost else after.metrics["eval/accuracy"],  # on the same problems
        "accuracy": math.nan if lost else after.whole["eval/accuracy"],
        "accuracy_interval": [after.whole["eval/accuracy_low"], after.whole["eval/accuracy_high"]],
        "length_before": before.metrics["eval/length"],
        "length": after.whole["eval/length"],
        "interim_eval_problems": len(components.eval_problems),
        "eval_problems": int(after.whole["eval/problems"]),
        **({"start": asdict(components.start)} if components.start else {}),
        "data": components.data_hash,
        "data_sizes": components.sizes,
        **more_accuracies(after.whole, *evaluator.rewards),
        "protocol": protocol_of(evaluator.settings, after.problems, tokenizer),
        "protocol_on_the_way": protocol_of(evaluator.settings, components.eval_problems, tokenizer)["hash"],
        "notices": dict(monitors.counts),
        "alarm": monitors.alarm(),
        **{name: round(value, 1) for name, value in counters.row().items()},
        **time_summary(counters.clock),
        "threads": torch.get_num_threads(),
    }


def print_reason(console: Console, folder: Path, status: str, reason: str) -> None:
    """Print what ended a run before its last step, and how to resume it all the same."""
    if status == "finished":
        return
    console.say(f"! {status}: {reason}")
    rule = status.partition(":")[2]
    more = f"{reason.partition('=')[0]}=MORE" if status == "budget" else f"monitors.{RULES.get(rule, rule)}=warn"
    if status != LOST:
        console.say(f"to go on   resume={short_path(folder)} {more}")


def print_example(
    console: Console, problems: Sequence[Problem], before: Sequence[Sample], after: Sequence[Sample]
) -> None:
    """Print a response from before and one from after training to a problem that is solved now, or else the first."""
    pairs = list(zip(before, after, strict=True))
    improved = [(b, a) for b, a in pairs if b.grade.outcome != "correct" and a.grade.outcome == "correct"]
    first, last = (improved or pairs)[0]
    problem = next(p for p in problems if p.id == first.group)
    console.say(f"\nThe same question, before and after:\n  {problem.question}   (answer: {problem.answer})")
    for label, sample in (("before", first), ("after", last)):
        console.say(f"  {label:6} {shorten(sample.response.text, SHOWN_CHARS)}   [{sample.grade.outcome}]")


def print_closing(
    console: Console, run: TrainingConfig, problems: Sequence[Problem], records: RunWriter,
    history: Sequence[Evaluated], summary: Mapping[str, Any],
) -> None:  # fmt: skip
    """Print what training changed, how exact that is, and where everything is. `problems`: of the evaluations."""
    before, after, folder = history[0], history[-1], records.folder
    print_example(console, problems, before.samples, after.samples)
    console.table("\n" + closing_table(before.metrics, after.metrics))
    if summary["eval_problems"] > summary["interim_eval_problems"]:
        low, high = summary["accuracy_interval"]
        console.say(format_accuracy(summary["accuracy"], low, high, summary["protocol"], summary.get("eval_questions")))
    else:
        console.table(f"{'protocol':22} {summary['protocol']['hash']:>37}")
    for line in describe_accuracies(summary["accuracy"], summary):
        console.say(line)
    if line := time_line(summary):
        console.say(line)
    if summary["notices"]:
        seen = ", ".join(f"{name} x{count}" for name, count in summary["notices"].items())
        console.say(f"notices    {seen}")
    console.say(
        f"\n{summary['status']} in {summary['seconds']:.0f} s (threads: {summary['threads']}); "
        f"curves: {short_path(folder / CURVES)}" + (f", model: {short_path(folder / MODEL)}" if run.save_model else "")
    )
    if gone := summary["checkpoints"]["moments_removed"]:
        console.say(
            f"checkpoints keep the model; the optimizer's moments ({size(gone)}) are removed, and n_steps=MORE "
            "begins with new ones (checkpoint.keep_final=true keeps them)"
        )
    if run.eval.card is not None:
        console.say((folder / COMPLIANCE).read_text(encoding="utf-8").splitlines()[-1])
    print_loggers(console, records.loggers)
    if run.model.made_on_the_spot and SWEEP_VARIABLE not in os.environ:
        console.say(
            "\nTry next:\n"
            f"  rlreason inspect {short_path(folder)}\n"
            "  python -m rlreason loss=grpo_clip off_policy=e4_quarter   # 16 optimizer steps per rollout batch\n"
            "  python -m rlreason -m sweep=grpo_learning_rate            # five learning rates, one of them diverges\n"
            "  rlreason report runs/sweeps/grpo_learning_rate            # which is better, and by how much"
        )


SEEDS = ("seed", "split_seed")
OF_THE_FILE = ("_name_or_path", "transformers_version")  # in a model's config, but not part of the model


def run_facts(run: RunConfig, components: Components) -> dict[str, Any]:
    """Return what a run is made of, in plain values by group; of the weights a sample is hashed, in about a second.

    Call it before training changes a weight, and before a checkpoint is read.
    """
    policy, tokenizer, evaluator = components.policy, components.policy.tokenizer, components.evaluator
    prompts = {"prompt": run.asking.prompt} | (
        {} if run.evaluation.prompt is run.asking.prompt else {"eval.prompt": run.evaluation.prompt}
    )
    config, revision = policy.model.config, getattr(policy.model.config, "_commit_hash", None)  # of one from the hub
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = backend.to_str() if backend is not None else sorted(tokenizer.get_vocab().items())
    engine: dict[str, Any] = {"name": run.rollout.engine, "max_rows": run.rollout.max_rows}
    if isinstance(components.engine, VLLMEngine):  # every argument, defaults included
        asked = components.sampling
        stops = Stops(tokenizer, asked.stop, asked.min_tokens, asked.tags)
        sampled = sampling_arguments(asked, policy.end_ids | asked.end_ids, stops.sees_special)
        engine |= {"arguments": components.engine.arguments, "sampling": sampled}
    facts: dict[str, Any] = {
        "data": {"hash": components.data_hash, "sizes": components.sizes},
        "prompts": {key: digest(prompt_facts(prompt, tokenizer)) for key, prompt in prompts.items()},
        "model": {
            "name": run.model.name,
            **({"path": str(run.model.folder)} if run.model.folder is not None else {}),
            **({"revision": revision} if revision else {}),
            "config": digest({key: value for key, value in config.to_dict().items() if key not in OF_THE_FILE}),
            "parameters": model_size(policy.model),
            "start_weights": weights_hash(policy.named_weights()),
        },
        "tokenizer": digest([rules, sorted(tokenizer.all_special_ids), getattr(tokenizer, "chat_template", None)]),
        "sampling": _sampling(components.sampling, policy),
        "eval_sampling": _sampling(evaluator.sampling, policy) | {"samples": evaluator.settings.samples},
        "engine": engine,
        "seeds": {leaf.key: leaf.value for leaf in leaves(run) if leaf.key.rpartition(".")[2] in SEEDS},
        "device": device_facts(policy),
    }
    return redacted(facts)


def digest(value: Any) -> str:
    """Return 16 hex digits of a plain value.

    >>> digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1}), len(digest("x"))
    (True, 16)
    """
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:16]


def _sampling(sampling: Sampling, policy: Policy) -> dict[str, Any]:
    """Return every sampling number, and the tokens that end a response: the model's own and those of a chat's turn."""
    lists = {"stop": list(sampling.stop), "tags": list(sampling.tags)}
    return asdict(sampling) | lists | {"end_ids": sorted(policy.end_ids | sampling.end_ids)}


def device_facts(policy: Policy) -> dict[str, Any]:
    """Return where the model is, and what decides how sums are rounded there."""
    device = policy.device
    facts: dict[str, Any] = {
        "type": device.type,
        "products": str(policy.compute_dtype).removeprefix("torch."),
        "head": str(policy.head_dtype).removeprefix("torch."),
        "weights": str(policy.weights).removeprefix("torch."),
        "attention": policy.attention,
        "threads": torch.get_num_threads(),
        "cpu_instructions": torch.backends.cpu.get_cpu_capability(),
        "float32_matmul": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    if device.type == "cuda":
        facts |= {
            "name": torch.cuda.get_device_name(device),
            "count": torch.cuda.device_count(),
            "capability": ".".join(map(str, torch.cuda.get_device_capability(device))),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "tf32": torch.backends.cuda.matmul.allow_tf32,
        }
    return facts
