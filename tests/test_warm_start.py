"""The prompts of an ablation start from the same weights; every other prompt has a warm start to itself."""

import random

import pytest
import torch
from hydra import compose, initialize_config_dir
from test_end_to_end import SMALL, rlreason, rows_of

from rlreason.config.leaves import resource_dir
from rlreason.config.store import typed
from rlreason.config.training import OptimizationConfig
from rlreason.data.prepare import read_splits
from rlreason.data.tasks import habit_trace
from rlreason.errors import ConfigError
from rlreason.grading import Grader
from rlreason.model.parameters import build_model, build_tokenizer
from rlreason.model.policy import Policy
from rlreason.objectives.objective import LengthNormConfig, Objective
from rlreason.records.console import Console
from rlreason.training.algorithms import sft_sample
from rlreason.training.build import make_policy, teach_habits
from rlreason.training.learner import Learner
from rlreason.training.warm_start import SHARED, format_of, formats_of, shipped
from tests.waiting import patient

FOUR = tuple(dict.fromkeys(SHARED))


@pytest.fixture
def asked():
    with initialize_config_dir(str(resource_dir("conf")), version_base="1.3"):
        yield lambda *words: typed(
            compose("config", ["model.width=32", "data.n_train=128", "model.cache=null", *words])
        )


def taught(run) -> Policy:
    train = read_splits(run.data, print)[0]
    policy = make_policy(run, train)
    teach_habits(run, policy, train, Console())
    return policy


def weights(policy: Policy) -> list[torch.Tensor]:
    return [weight for _, weight in policy.named_weights()]


def equal(one: Policy, other: Policy) -> bool:
    pairs = zip(weights(one), weights(other), strict=True)
    return one.tokenizer.get_vocab() == other.tokenizer.get_vocab() and all(torch.equal(a, b) for a, b in pairs)


def test_the_prompts_of_an_ablation_start_from_bit_equal_weights(asked):
    assert set(FOUR) == {"r1_zero", "r1_zero_three_shot", "question_only", "question_boxed"}
    small = ["model.warm_start.steps=2", "model.warm_start.batch_size=32"]
    first = taught(asked("prompt=r1_zero", *small))
    before = make_policy(asked("prompt=r1_zero"), read_splits(asked().data, print)[0])
    assert not any(torch.equal(a, b) for a, b in zip(weights(first), weights(before), strict=True))
    for words in (
        ("prompt=question_only",),
        # so does an ablation of anything but the template
        ("prompt=r1_zero", "prompt.reward=operator:eq", "prompt.stop=[]", "seed=1", "micro_batch_tokens=999"),
    ):
        assert equal(first, taught(asked(*words, *small)))
    taught_alike = {tuple((f.prompt("?"), f.trace) for f in formats_of(asked(f"prompt={name}"))) for name in FOUR}
    assert len(taught_alike) == 1
    assert not equal(first, taught(asked("prompt=r1_zero", "model.seed=1", *small)))


def test_the_default_keeps_its_own_warm_start(asked):
    """Written out once more: one format, tags in every trace, random numbers for nothing else."""
    run = asked("model.warm_start.steps=3", "model.warm_start.batch_size=8")
    train, of_tokenizer, rng = read_splits(run.data, print)[0], random.Random("tokenizer"), random.Random("warm-up/0")

    def prompt(question: str) -> str:
        return f"User: {question}\nAssistant: <think>"

    def trace(problem, rng, hasty, slip) -> str:
        steps = problem.solution.split(" ")[: 1 if rng.random() < hasty else None]
        if rng.random() < slip:
            left, right = steps[-1].split("=")
            steps[-1] = f"{left}={max(0, int(right) + rng.choice((-2, -1, 1, 2)))}"
        return f" {' '.join(steps)} </think> <answer>{steps[-1].split('=')[1]}</answer>"

    tokenizer = build_tokenizer([prompt(p.question) + trace(p, of_tokenizer, 0.5, 0.0) for p in train], 512)
    policy = Policy(build_model(len(tokenizer), 32), tokenizer)
    learner = Learner(
        policy, Objective(length_norm=LengthNormConfig("token")), OptimizationConfig(3e-3), micro_batch_tokens=8192
    )
    for step in range(3):
        samples = []
        for p in rng.choices(train, k=8):
            text = trace(p, rng, 0.72, 0.05)
            ids = policy.encode_prompt(prompt(p.question)), policy.encode_response(text)
            samples.append(sft_sample(*ids, text))
        learner.update(samples, learning_rate=3e-3 * min(1.0, (step + 1) / 0.15) * (1 - 0.9 * step / 3))
    assert equal(policy, taught(run))


@pytest.mark.parametrize("name", [*FOUR, "r1_zero_short"])
def test_both_habits_are_written_as_the_prompts_reward_reads_them(asked, name):
    prompt, rng = shipped(name), random.Random(0)
    (problem,) = read_splits(asked("data.n_train=1", "data.min_events=3").data, print)[0]
    hasty, careful = (habit_trace(problem, rng, share, 0.0, format_of(prompt).trace) for share in (1.0, 0.0))
    assert (hasty.count("="), careful.count("=")) == (1, problem.solution.count("="))
    with Grader(patient(), prompt.reward) as grader:
        grades = grader.grade_batch([hasty, careful], [problem.answer] * 2)
    assert [grade.format for grade in grades] == [1.0, 1.0]
    assert grades[1].outcome == "correct"
    assert all(careful.endswith(stop) for stop in prompt.stop)  # nothing is learned that would never be sampled


def test_every_prompt_with_its_longest_response_fits_the_model_and_a_micro_batch(asked):
    train = read_splits(asked().data, print)[0]
    for name in FOUR:
        run = asked(f"prompt={name}")
        policy, form = make_policy(run, train), format_of(run.prompt)
        longest = max(len(policy.encode_prompt(form.prompt(p.question))) for p in train) + run.sampling.max_tokens
        assert longest <= policy.max_context < run.micro_batch_tokens


def test_a_prompt_of_ones_own_has_a_warm_start_to_itself(asked, tmp_path):
    mine, copy = tmp_path / "mine.prompt", tmp_path / "copy.prompt"
    mine.write_text("Q: {question}\nA:")
    copy.write_text((resource_dir("prompts") / "r1_zero.prompt").read_text())
    (boxed,) = formats_of(asked("prompt=question_only", f"prompt.file={mine}"))
    assert (boxed.prompt("1+1?"), boxed.trace) == ("Q: 1+1?\nA:", shipped("question_only").trace)
    (tagged,) = formats_of(asked(f"prompt.file={mine}", "prompt.trace='{solution}'"))
    assert tagged.trace.endswith("<answer>{answer}</answer>")
    assert len(formats_of(asked(f"prompt.file={copy}"))) == len(SHARED)  # the same text is the same prompt


@pytest.mark.parametrize("words", [["prompt=r1_zero", "prompt.reward=question_only"], ["prompt.trace='{answer}'"]])
def test_a_form_that_the_reward_never_reads_is_one_line_with_the_cure(asked, words):
    with pytest.raises(ConfigError, match="choose") as error:
        formats_of(asked(*words))
    assert len(str(error.value).splitlines()) == 1


def test_the_tiny_model_trains_on_the_bare_question(tmp_path):
    done = rlreason("prompt=question_only", *SMALL, "n_steps=1", "model.cache=null", "hydra.run.dir=x", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "prompt formats: 4 " in done.stdout
    assert rows_of(tmp_path / "x", "reward/mean")[0]["rollout/tokens"] > 0
