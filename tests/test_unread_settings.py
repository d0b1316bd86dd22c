"""Which settings a run reads, found out by running it; and that a setting nothing reads is refused when given.

Every algorithm meets every kind of data and the options that switch parts of a run off, on the smallest models. The
config records which of its fields the real code asks for. What was not asked for must be declared by
its field (`only_if`), and what is declared unread must not have been asked for.
"""

import io
import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from recording import Recording
from test_chat import QWEN3, with_template

from rlreason.config.leaves import leaves
from rlreason.config.rules import unread_keys
from rlreason.config.training import TrainingConfig
from rlreason.errors import ConfigError
from rlreason.evaluation.evaluator import protocol_of
from rlreason.model.parameters import build_model
from rlreason.model.policy import Policy
from rlreason.records.console import Console
from rlreason.records.writer import RunWriter
from rlreason.training.algorithms import GRPO, Algorithm, with_advantages
from rlreason.training.build import build_components, make_algorithm, make_learner
from rlreason.training.jobs import start
from rlreason.training.learner import Learner
from rlreason.training.train import train
from tests.run_settings import settings
from tests.some import some
from tests.test_rollouts_and_records import graded

#: Settings of vLLM's engine. Starting it takes too long here: tests/test_vllm*.py record what it reads.
VLLM_SETTINGS = {f"rollout.{key}" for key in ("max_rows", "sleep", "kv_cache_gb", "attest", "timeout_s")}
WHICH = "algorithm"  # it has chosen the schema, and nothing needs to ask again
AROUND = {"waits.run_s", "model.check_memory"}  # read by what surrounds a run: its process, its sweep, its start
IN_PASSING = {"data.hub_config", "eval.data.hub_config", "prompt.reward"}  # handed on with each path; named in errors
#: Read only where there is something to compare or to leave out: tests of monitors, answers and data hold them.
WHERE_NEEDED = re.compile(
    r"monitors\.\w+_(above|after|factor|gain|steps)|grading\.(percent|rel_tol)|(eval\.(sets\.\w+\.)?)?data\.bad_rows"
)


def compare(run: Any, read: set[str], only: set[str] | None = None) -> None:
    """Hold the conditions to what was read, in both directions."""
    read = set(read)  # looking at the run from here on is no use of it
    known = {leaf.key for leaf in leaves(run)} - {WHICH, *AROUND}
    known = known if only is None else known & only
    declared = set(unread_keys(run))
    silent = sorted(key for key in known - read - declared if not WHERE_NEEDED.fullmatch(key))
    assert not silent, f"nothing read {silent}: let the run read them, or say only_if="
    wrong = sorted((known & read & declared) - IN_PASSING)
    assert not wrong, f"read although only_if says that nothing does: {wrong}"


@pytest.fixture(scope="module")
def places(tokenizer, tmp_path_factory) -> dict[str, Path]:
    """A small model's folder, and data in files."""
    folder = tmp_path_factory.mktemp("places")
    tokenizer = with_template(tokenizer, QWEN3)
    Policy(build_model(len(tokenizer), width=16, layers=1, init_scale=0.3, seed=1), tokenizer).save(folder / "model")
    rows = [{"question": f"{i} and 0?", "answer": f"#### {i}", "solution": f"{i}+0={i}"} for i in range(24)]
    sums = [{"nums": [i, 2, 3], "target": i + 5} for i in range(1, 99)]
    for name, part in (("train", rows[:16]), ("test", rows[16:]), ("countdown", sums)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    return {"model": folder / "model", "rows": folder, "countdown": folder / "countdown.jsonl"}


SIZES = "eval_problems=2 sampling.max_tokens=6 scale=embedded prompt=r1_zero_short threads=1"
TRAINED = "n_steps=2 train_batch_size=4"
#: Without the reward a random model leaves expert iteration nothing to imitate.
ALL_RIGHT = "prompt.reward=own_reward:all_right prompt.stop=[a,e,i,o,1,2,3,4,5]"
ALGORITHMS = {
    "grpo": f"{TRAINED} rollout_batch_size=4 group_size=2",
    "ei": f"algorithm=ei {TRAINED} question_batch_size=2 group_size=2 {ALL_RIGHT}",
    "sft": f"algorithm=sft {TRAINED}",
    "evaluate": "algorithm=evaluate",
    "evaluate_train": "algorithm=evaluate split=train",
    "best_of_n": "algorithm=best_of_n n_list=[1,2]",
}
LOCAL = "model=local model.path={model} "
MADE_UP = " data.n_train=16 data.n_validation=4"
DATA = {
    "stories": "model.width=16 model.layers=1 model.warm_start.steps=1 data.n_train=256 data.n_validation=4",
    "files": f"{LOCAL} data=jsonl data.path={{rows}}",
    "held_out": f"{LOCAL} data=jsonl data.train={{rows}}/train.jsonl data.n_validation=4",
    "countdown": f"{LOCAL} data=countdown {MADE_UP}",
    "countdown_file": f"{LOCAL} data=countdown data.path={{countdown}} {MADE_UP}",
    "gym": f"{LOCAL} data=reasoning_gym data.task=leg_counting {MADE_UP}",
}
ASKED = "prompt@eval.prompt=question_only eval.sampling.temperature=0.5 "
OTHER = f"{ASKED} data@eval.data=stories_hard eval.data.n_validation=4 "

#: What switches parts of a run on and off: an algorithm, a kind of data, and settings on top.
PARTS = {
    "kl in the reward": ("grpo", "files", "objective=gspo kl_placement=reward kl_coef=0.1"),
    "everything else of GRPO": ("grpo", "files", "objective=dapo std_norm=none length_norm=constant overlong_cache=2 "
        "mismatch=mask mismatch_cap=2 epochs_per_rollout=2 max_resampling_rounds=1 gradient_accumulation_steps=2 "
        "kl_placement=loss kl_coef=0.1"),
    "a chat": ("sft", "files", "prompt.chat=true prompt.system=Brief. prompt.enable_thinking=false"),
    "without a warm start": ("grpo", "stories", "model.warm_start.steps=0"),
    "adapters": ("sft", "files", "model.lora.rank=2 length_norm=constant"),
    "epochs": ("sft", "files", "n_steps=null epochs=0.5 data.filter=correct"),
    "stars": ("ei", "files", "restart=true data.limit=8"),
    "a reward of one's own": ("grpo", "countdown", "prompt.reward=rlreason.grading.verifiers.countdown:r1_zero"),
    "evaluated in another way": ("grpo", "stories", f"{OTHER} eval.data.n_train=8 eval.reward=own_reward:all_right "
        "eval.samples=2 eval.final_problems=3"),
    "the tiny model, asked in another way": ("best_of_n", "stories", f"{OTHER} eval.sampling.min_tokens=1"),
    "training problems, asked in another way": ("evaluate_train", "files", f"{ASKED} eval.sampling.min_tokens=1 "
        "eval.samples=2"),
    "evaluated on what is held out": ("sft", "files", "data@eval.data=jsonl eval.data.train={rows}/test.jsonl "
        "eval.data.n_validation=4"),
    "judged traces": ("evaluate_train", "files", "data.filter=correct"),
    "rows held out": ("sft", "held_out", ""), "problems that are made": ("ei", "countdown", ""),
    "problems from a file": ("evaluate_train", "countdown_file", ""), "tasks of the gym": ("best_of_n", "gym", ""),
    "more sets": ("grpo", "stories", "+data@eval.sets.hard.data=stories_hard "
        "+prompt@eval.sets.hard.prompt=question_only eval.sets.hard.samples=2 eval.sets.hard.data.n_validation=4"),
}  # fmt: skip


def composed(places: dict[str, Path], algorithm: str, data: str, more: str = "") -> Any:
    words = " ".join((DATA[data], SIZES, ALGORITHMS[algorithm], more)).split()
    return settings(*[word.format(**places) for word in words])


def learn(learner: Learner, algorithm: Algorithm) -> None:
    """What only a step reads of the objective: advantages and a gradient, from two responses of two tokens."""
    reference = [-5.0, -5.0] if learner.objective.kl_placement != "none" else None
    scored = {"log_probs": [-5.0] * 2, "old_log_probs": [-5.0] * 2, "reference_log_probs": reference}
    samples = [replace(graded("p", reward), advantage=2 * reward - 1, **scored) for reward in (0.0, 1.0)]
    if isinstance(algorithm, GRPO):
        samples, _ = with_advantages(samples, algorithm.settings)
    learner.gradient(samples)


def prepare(run: Any, folder: Path) -> None:
    """All that the real code does before the first response is sampled."""
    console = Console(out=io.StringIO())
    components = build_components(run, folder, console)
    components.close()
    header, asks = list[str](), components.evaluator.settings
    for one in (asks, *(of.evaluator.settings for of in components.sets)):
        header += [one.data.name, one.prompt.name, one.sampling.describe()]  # of a run's first lines
    header += [run.data.name, run.prompt.name] if isinstance(run, TrainingConfig) else []
    assert all(header)
    protocol_of(asks, components.eval_problems, components.policy.tokenizer)
    if isinstance(run, TrainingConfig):
        algorithm = make_algorithm(run, components, console)
        learn(make_learner(run, components.policy), algorithm)


@pytest.fixture(scope="module")
def whole(places, tmp_path_factory) -> Callable[[str], tuple[Any, set[str], set[str]]]:
    """A whole run of an algorithm on stories: (its settings, what it read, what only its steps read)."""

    @cache
    def of(algorithm: str) -> tuple[Any, set[str], set[str]]:
        folder = tmp_path_factory.mktemp(algorithm)
        before, run = (composed(places, algorithm, "stories") for _ in range(2))
        first, whole = Recording(before), Recording(run)
        prepare(before, folder / "first")
        act = train if isinstance(run, TrainingConfig) else start
        act(run, RunWriter(folder / "whole", "seed: 0\n"), Console())
        return run, set(whole.read), whole.read - first.read

    return of


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_whole_run_reads_its_settings(algorithm, whole):
    run, read, _ = whole(algorithm)
    compare(run, read)


@pytest.mark.parametrize("part", some(PARTS, 3))
def test_every_part_of_a_run_reads_its_settings_and_only_then(part, whole, places, tmp_path):
    algorithm, data, more = PARTS[part]
    if package := {"adapters": "peft", "tasks of the gym": "reasoning_gym"}.get(part):
        pytest.importorskip(package)
    run = composed(places, algorithm, data, more)
    recording = Recording(run)
    prepare(run, tmp_path)
    compare(run, recording.read | whole(algorithm)[2])


CLOUD = "model=smollm2_135m"
ASYNC = "rollout=vllm rollout.async_level=1 rollout.sleep=false loss=grpo_clip"


def test_a_setting_that_nothing_reads_is_refused_with_the_place_where_it_is_read():
    """Bug: a typed setting has no effect and no one says so, or one that has is refused."""
    for words, cure in {
        f"{ASYNC} mismatch=truncate mismatch_cap=2": "exactly 1",
        "rollout=vllm rollout.placement=second_gpu rollout.sleep=false": "colocate",
        f"{CLOUD} data.split_seed=3": "data.n_validation=200",
        "prompt=r1_zero prompt.trace='{answer}'": "leave it out",
    }.items():
        with pytest.raises(ConfigError, match=cure):
            settings(*words.split())
    settings("kl_estimator=k3", "advantage_eps=1e-6", "std_norm=none")  # what they are anyway
    settings(CLOUD, "data=tulu_math")  # an option describes its data for every algorithm
    settings("prompt.trace='{answer}'")  # the tiny model's own warm start is written in it
    settings("algorithm=evaluate", "sampling.temperature=0")  # one response each
    settings(CLOUD, "data.n_validation=9", "data.validation=null", "data.split_seed=3")
    settings(*ASYNC.split(), "monitors.parity=correct")  # there the loss's own ratio corrects
