"""From settings to parts: traces as ids, what is too long, an engine's room, where a model is, a loss's constants."""

import io

import pytest

from rlreason.data.tasks import make_stories
from rlreason.engines.build import demand_of
from rlreason.errors import ConfigError
from rlreason.grading.grader import reward_name_of as reward_name
from rlreason.model.chat import PromptEncoder
from rlreason.records.console import Console
from rlreason.training.build import fitting, make_traces
from rlreason.types import Problem
from tests.run_settings import settings


@pytest.fixture
def prompt_ids(policy):
    return PromptEncoder(policy, settings().prompt)  # r1_zero_short


def test_a_trace_is_the_solution_in_the_prompts_form_with_its_end(policy, prompt_ids, problems):
    """Bug: SFT imitates another text than the data's, or never its end."""
    given = Problem("g", "1+1?", "2", prompt="Say: ", response="two of them")  # taken word for word
    samples = make_traces(settings("algorithm=sft"), policy, [*problems[:5], given], prompt_ids, Console())
    for sample, problem in zip(samples, [*problems[:5], given], strict=True):
        *body, end = sample.response.token_ids
        assert end == policy.tokenizer.eos_token_id
        solved = f" {problem.solution} </think> <answer>{problem.answer}</answer>"
        assert policy.tokenizer.decode(body) == (problem.response or solved)
        assert (sample.advantage, sample.group) == (1.0, problem.id)
    assert policy.tokenizer.decode(samples[-1].response.prompt_ids) == "Say: "


def test_what_is_too_long_is_refused_or_left_out_and_counted(policy, prompt_ids, problems):
    """Bug: a sequence without room is cut, or left out without a word."""
    console = Console(out=io.StringIO())
    traces = [*problems[:3], Problem("long", "q", "1", solution="1+1=2 " * 400)]
    prompts = [*problems[:2], Problem("long", "word " * 800, "1")]

    def fitted(part, problems, *words):
        return fitting(settings(*words), policy, part, problems, [len(prompt_ids(p)) for p in problems], console)

    with pytest.raises(ConfigError, match=r"^1 of 4 traces .*bad_rows=skip"):
        make_traces(settings("algorithm=sft"), policy, traces, prompt_ids, console)
    with pytest.raises(ConfigError, match=r"^1 of 3 train prompts.*data.bad_rows=skip"):
        fitted("train", prompts)
    kept = make_traces(settings("algorithm=sft", "data.bad_rows=skip"), policy, traces, prompt_ids, console)
    assert [s.group for s in kept] == [p.id for p in problems[:3]]
    assert fitted("train", prompts, "data.bad_rows=skip") == problems[:2]
    assert console.out.getvalue().count("left out: 1 of ") == 2
    for key in ("sampling.max_tokens", "eval.sampling.max_tokens"):
        with pytest.raises(ConfigError, match=rf"^2 of 2 validation prompts with {key}=510 .*lower {key}"):
            fitted("validation", problems[2:4], f"{key}=510")


def test_an_engines_room_is_planned_from_what_the_run_asks_for(policy, prompt_ids):
    """Every prompt that can be drawn with a full response, in as many rows as are ever asked for at once."""
    train, validation = [*make_stories(2, seed=0), Problem("long", "word " * 90, "1")], make_stories(40, seed=1)
    for words, rows, sampled_from in (
        ("rollout_batch_size=32 train_batch_size=32 group_size=4 eval_problems=null", 40, train),
        ("algorithm=ei question_batch_size=3 group_size=2 eval_problems=2", 6, train),
        ("algorithm=sft eval_problems=7", 7, validation),
        ("algorithm=best_of_n n_list=[1,4] eval_problems=2 split=train", 8, train),
    ):
        run = settings("rollout=vllm", "sampling.max_tokens=50", *words.split())
        demand = demand_of(run, prompt_ids, prompt_ids, train, validation)
        assert (demand.longest, demand.rows) == (50 + max(len(prompt_ids(p)) for p in sampled_from), rows)


def test_data_with_a_verifier_brings_its_reward_and_a_runs_folder_stands_for_the_model_it_left(tmp_path):
    countdown = settings("data=countdown", "model=smollm2_135m")
    assert reward_name(countdown.prompt.reward, countdown.data) == "rlreason.grading.verifiers.countdown:r1_zero"
    assert reward_name("mine:reward", countdown.data) == "mine:reward"  # unless the user has one
    assert reward_name(settings().prompt.reward, settings().data) == "r1_zero"
    (tmp_path / "run/model").mkdir(parents=True)
    (tmp_path / "run/model/config.json").write_text("{}")
    found = settings("model=local", "data=stories", f"model.path={tmp_path}/run").model.folder
    assert found == str(tmp_path / "run/model")
    with pytest.raises(ConfigError, match=r"config.json"):
        settings("model=local", "data=stories", f"model.path={tmp_path}")


def test_what_is_learned_follows_from_the_algorithm_and_no_number_is_taken_for_null():
    for algorithm, temperature in (("sft", 1.0), ("ei", 1.0), ("grpo", 0.7)):
        assert settings(f"algorithm={algorithm}", "sampling.temperature=0.7").learning_temperature == temperature
    words = ("length_norm=constant", "overlong=penalty", "sampling.max_tokens=20")
    given = settings(*words, "length_norm.constant=0.5", "overlong_cache=1").objective()
    assert (given.length_constant, given.overlong_limits["cache_length"]) == (0.5, 1)
    left = settings(*words).objective()
    assert (left.length_constant, left.overlong_limits) == (20, {"max_length": 20, "cache_length": 4})
    imitation = settings("algorithm=sft", "length_norm=constant", "sampling.max_tokens=20").objective()
    assert (imitation.length_constant, imitation.kl_coef, imitation.entropy_coef) == (20, 0, 0)
    words = ("algorithm=sft", "n_steps=null", "epochs=1")  # where passes decide how many steps there are
    assert not list(settings(*words, "warmup_steps=5").schedule_rules(5))
    assert "warmup_steps=6" in "".join(settings(*words, "warmup_steps=6").schedule_rules(5))
