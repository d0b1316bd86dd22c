"""From settings to rooms: traces as ids, what is too long, the reward of the data, where a model lies."""

import io

import pytest

from rlreason.config.conflicts import of_schedule
from rlreason.data.tasks import make_stories
from rlreason.engines.build import demand_of
from rlreason.errors import ConfigError
from rlreason.grading.grader import reward_name_of as reward_name
from rlreason.model.chat import encoder
from rlreason.records.console import Console
from rlreason.training.build import fitting, make_traces
from rlreason.types import Problem
from tests.run_settings import settings


@pytest.fixture
def prompt_ids(policy):
    return encoder(policy, settings().prompt)  # r1_zero_short


def test_a_trace_is_the_solution_in_the_prompts_form_with_its_end(policy, prompt_ids, problems):
    given = Problem("g", "1+1?", "2", prompt="Say: ", response="two of them")  # taken word for word
    samples, notices = make_traces(settings("algorithm=sft"), policy, [*problems[:5], given], prompt_ids)
    assert not notices
    for sample, problem in zip(samples, [*problems[:5], given], strict=True):
        *body, end = sample.response.token_ids
        assert end == policy.tokenizer.eos_token_id
        solved = f" {problem.solution} </think> <answer>{problem.answer}</answer>"
        assert policy.tokenizer.decode(body) == (problem.response or solved)
        assert (sample.advantage, sample.group) == (1.0, problem.id)
    assert policy.tokenizer.decode(samples[-1].response.prompt_ids) == "Say: "


def test_a_trace_too_long_is_refused_or_counted(policy, prompt_ids, problems):
    few = [*problems[:3], Problem("long-7", "q", "1", solution="1+1=2 " * 400)]
    with pytest.raises(ConfigError, match=r"1 of 4 traces .* long-7 .*bad_rows=skip"):
        make_traces(settings("algorithm=sft"), policy, few, prompt_ids)
    samples, (notice,) = make_traces(settings("algorithm=sft", "data.bad_rows=skip"), policy, few, prompt_ids)
    assert [s.group for s in samples] == [p.id for p in problems[:3]]
    assert notice.startswith("left out: 1 of 4 traces")


def test_a_prompt_too_long_is_refused_or_counted(policy, prompt_ids, problems):
    out, few = io.StringIO(), [*problems[:2], Problem("long", "word " * 800, "1")]
    console = Console(out=out)
    with pytest.raises(ConfigError, match=r"1 of 3 train prompts.*data.bad_rows=skip"):
        fitting(settings(), policy, "train", few, prompt_ids, console)
    run = settings("data.bad_rows=skip")
    assert fitting(run, policy, "train", few, prompt_ids, console) == problems[:2]
    assert fitting(run, policy, "validation", problems[2:4], prompt_ids, console) == problems[2:4]
    assert "left out: 1 of 3 train problems" in out.getvalue()
    for key in ("sampling.max_tokens", "eval.sampling.max_tokens"):
        with pytest.raises(ConfigError, match=rf"^{key}=510 .*2 of 2 validation prompts.*lower {key}"):
            fitting(settings(f"{key}=510"), policy, "validation", problems[2:4], prompt_ids, console)


@pytest.mark.parametrize(
    ("words", "rows"),
    [
        (["rollout_batch_size=32", "train_batch_size=32", "group_size=4", "eval_problems=2"], 32),
        (["rollout_batch_size=32", "train_batch_size=32", "group_size=4", "eval_problems=null"], 40),
        (["algorithm=ei", "question_batch_size=3", "group_size=2", "eval_problems=2"], 6),
        (["algorithm=sft", "eval_problems=7"], 7),
        (["algorithm=evaluate", "samples=3", "eval_problems=2"], 6),
        (["algorithm=best_of_n", "n_list=[1,4]", "eval_problems=2", "split=train"], 8),
        (["algorithm=evaluate", "split=train", "eval_problems=null"], 3),
    ],
)
def test_an_engines_room_is_planned_from_what_the_run_asks_for(policy, prompt_ids, words, rows):
    """Every prompt that can be drawn with a full response, in as many rows as are ever asked for at once."""
    run = settings("rollout=vllm", "sampling.max_tokens=50", *words)
    train, validation = list(make_stories(3, seed=0)), make_stories(40, seed=1)
    train[1] = Problem("long", "word " * 90, "1")
    demand = demand_of(run, prompt_ids, prompt_ids, train, validation)
    sampled_from = train if run.samples_training_data else []
    assert demand.longest == 50 + max(len(prompt_ids(p)) for p in [*sampled_from, *validation])
    assert demand.rows == rows


@pytest.mark.parametrize(
    ("words", "reward"),
    [
        (("data=countdown", "model=smollm2_135m"), "rlreason.grading.verifiers.countdown:r1_zero"),
        (("data=countdown", "model=smollm2_135m", "prompt.reward=mine:reward"), "mine:reward"),
        ((), "r1_zero"),
    ],
)
def test_data_with_a_verifier_brings_its_reward_unless_the_user_has_one(words, reward):
    run = settings(*words)
    assert reward_name(run.prompt.reward, run.data) == reward


def test_a_runs_folder_stands_for_the_model_it_left(tmp_path):
    (tmp_path / "run/model").mkdir(parents=True)
    (tmp_path / "run/model/config.json").write_text("{}")
    words = ("model=local", "data=stories")
    for place in ("run", "run/model"):
        assert settings(*words, f"model.path={tmp_path}/{place}").model.folder == str(tmp_path / "run/model")
    with pytest.raises(ConfigError, match=r"config.json"):
        settings(*words, f"model.path={tmp_path}")


def test_sft_learns_the_plain_distribution_whatever_is_sampled():
    assert settings("algorithm=sft", "sampling.temperature=0.7").learning_temperature == 1.0
    assert settings("algorithm=ei", "sampling.temperature=0.7").learning_temperature == 1.0
    assert settings("sampling.temperature=0.7").learning_temperature == 0.7
    objective = settings("algorithm=ei").objective()
    assert (objective.loss.loss_type, objective.length_norm.kind) == ("reinforce_with_baseline", "token")
    assert objective.kl_coef == objective.entropy_coef == 0


def test_a_constant_is_the_one_that_was_given_and_null_the_longest_response():
    """No number is taken for null."""
    given = settings("length_norm=constant", "length_norm.constant=0.5", "overlong=penalty", "overlong_cache=1")
    assert given.objective().length_constant == 0.5
    assert given.objective().overlong_limits["cache_length"] == 1
    left = settings("length_norm=constant", "overlong=penalty", "sampling.max_tokens=20")
    assert left.objective().length_constant == 20
    assert left.objective().overlong_limits == {"max_length": 20, "cache_length": 4}
    imitation = settings("algorithm=sft", "length_norm=constant", "sampling.max_tokens=20")
    assert imitation.objective().length_constant == 20


def test_where_passes_decide_how_many_steps_there_are_the_learning_rate_is_checked_then():
    words = ("algorithm=sft", "n_steps=null", "epochs=1")
    assert not list(of_schedule(settings(*words, "warmup_steps=5"), 5))
    (line,) = of_schedule(settings(*words, "warmup_steps=6"), 5)
    assert "warmup_steps=6" in line
