"""Which questions are asked, what is kept of the answers, and how it is cut into optimizer steps."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from rlreason.config.groups import GradingConfig
from rlreason.config.training import OptimizationConfig
from rlreason.data.prompts import ProblemSampler
from rlreason.engines.base import Sampling
from rlreason.engines.rollouts import Rollouts
from rlreason.objectives.objective import LengthNormConfig, Objective
from rlreason.training.algorithms import GRPO, SFT, ExpertIteration, chosen_responses, mixed_groups, sft_sample
from rlreason.training.learner import Learner
from rlreason.types import Collected, Grade, Problem, Response, Sample
from tests.run_settings import settings


def numbered(count: int) -> list[Problem]:
    return [Problem(str(i), f"question {i}", str(i)) for i in range(count)]


def answer(problem_id: str, correct: bool, text: str = "", ended: bool = True) -> Sample:
    grade = Grade(1.0, float(correct), float(correct), "correct" if correct else "wrong")
    return Sample(Response(problem_id, [5], [1, 2], [-0.5, -0.1], text, "stop" if ended else "length"), grade)


class ByChance:
    """Grades that a seed and the response decide: some groups are all right, some all wrong, most are mixed."""

    grading = GradingConfig(workers=1)

    def __init__(self, share: float) -> None:
        self.share = share

    def grade_batch(self, responses, golds):
        rights = [random.Random(f"{r}{g}").random() < self.share for r, g in zip(responses, golds, strict=True)]
        return [Grade(1.0, float(right), float(right), "correct" if right else "wrong") for right in rights]


@pytest.fixture
def rollouts_of(engine, policy):
    return lambda share: Rollouts(engine, ByChance(share), lambda p: policy.encode_prompt(p.question), seed=0)


def test_a_step_asks_each_question_once_and_a_pass_covers_all():
    """Bug: a question is asked twice in a step, or never, or in another order after a restart."""
    questions = ProblemSampler(numbered(10), seed=0)
    steps = [questions.next_batch(4) for _ in range(10)]
    assert all(len({p.id for p in step}) == 4 for step in steps)
    assert {p.id for step in steps[:3] for p in step} == {str(i) for i in range(10)}  # 12 places for 10 problems
    assert steps[0] != ProblemSampler(numbered(10), seed=1).next_batch(4)
    assert len(ProblemSampler(numbered(10), seed=0).next_batch(50)) == 10  # more asked for than there are
    solving = ProblemSampler(numbered(6), seed=0, skip_solved=2)
    for _ in range(2):
        solving.update([answer("0", True), answer("0", True), answer("1", True), answer("1", False)])
    assert solving.n_solved == 1
    assert {p.id for p in solving.next_batch(6)} == {"1", "2", "3", "4", "5"}
    solving.update([answer("0", False)])  # a wrong answer ends the streak
    assert solving.n_solved == 0
    for _ in range(2):
        solving.update([answer(str(i), True) for i in range(6)])
    assert solving.next_batch(3) == []


def traces(policy, count: int) -> list[Sample]:
    encode, end = policy.tokenizer.encode, policy.tokenizer.eos_token_id
    return [sft_sample(encode(f"{i} + 1 ="), [*encode(f" {i + 1}"), end], f" {i + 1}") for i in range(count)]


def test_sft_passes_over_all_traces_and_ends_where_its_epochs_end(policy):
    given = traces(policy, 10)
    sft = SFT(given, batch_size=4, seed=0, total=15)
    assert sft.n_steps == 4
    batches = [sft.collect(step).batches[0] for step in range(1, 5)]
    assert [len(b) for b in batches] == [4, 4, 4, 3]
    seen = [id(s) for b in batches for s in b]
    assert set(seen[:10]) == {id(s) for s in given}
    assert len(set(seen[10:])) == 5
    assert [id(s) for s in sft.collect(2).batches[0]] == seen[4:8]  # a function of the step alone
    assert SFT(given[:2], 4, seed=0, total=2).collect(1).metrics["sft/sequences"] == 2


def imitating(policy, can_restart: bool = False, **settings) -> Learner:
    learns = Objective(length_norm=LengthNormConfig("token"))
    optimization = OptimizationConfig(1e-2, micro_batch_size=1, **settings)
    return Learner(policy, learns, optimization, can_restart=can_restart)


def test_expert_iteration_learns_from_correct_responses_only_and_as_often_as_asked(rollouts_of, problems):
    of_a = [answer("a", True, text) for text in ("1 + 1 = 2", " 1 + 1  = 2", "2")]
    samples = [*of_a, answer("a", False, "3"), answer("b", True, "2"), answer("b", True, "no end", ended=False)]
    for most, deduplicate, kept in ((None, False, {0, 1, 2, 4}), (None, True, {0, 2, 4}), (1, False, {0, 4})):
        assert chosen_responses(samples, most, deduplicate) == kept
    words = "algorithm=ei question_batch_size=6 group_size=4 sft_epochs=2 train_batch_size=5 restart=true"
    often = Sampling(1.0, 2, 24, stop=tuple("aeiouns"))  # a model with random weights rarely ends by itself
    collected, nothing = (
        ExpertIteration(settings(*words.split()), rollouts_of(share), ProblemSampler(problems, 0), often).collect(1)
        for share in (0.4, 0.0)
    )
    assert collected.restart
    kept = [s for s in collected.samples if s.has_loss]
    assert 0 < len(kept) < len(collected.samples) == 24
    assert all(s.grade.outcome == "correct" and not s.response.truncated and s.advantage == 1.0 for s in kept)
    assert all(s.advantage == 0.0 for s in collected.samples if not s.has_loss)
    assert collected.metrics["ei/kept"] == len(kept)
    assert len(collected.batches) == 2 * -(-len(kept) // 5)
    assert Counter(id(s) for batch in collected.batches for s in batch) == {id(s): 2 for s in kept}
    assert (nothing.batches, nothing.restart) == ([], False)
    assert "nothing_to_imitate" in nothing.notices


def grpo(rollouts, problems, rounds=0) -> GRPO:
    run = settings("rollout_batch_size=24", "group_size=4", "train_batch_size=24", f"max_resampling_rounds={rounds}")
    return GRPO(run, rollouts, ProblemSampler(problems, 0), Sampling(1.0, 2, 8), scorer=None, reference=None)


def test_refilling_replaces_groups_without_signal_up_to_its_bound_and_until_questions_end(rollouts_of, problems):
    plain = grpo(rollouts_of(0.12), problems).collect(1)
    dead = 6 - len(mixed_groups(plain.samples))
    assert dead > 0
    refilled = grpo(rollouts_of(0.12), problems, rounds=20).collect(1)
    (batch,) = refilled.batches
    assert len(batch) == 24
    assert len(mixed_groups(batch)) == 6
    assert mixed_groups(plain.samples) <= mixed_groups(batch)  # what was good stays
    discarded = [s for s in refilled.samples if id(s) not in {id(b) for b in batch}]
    assert len(discarded) == refilled.metrics["rollout/discarded"] >= 4 * dead
    assert not any(s.has_loss or s.advantage for s in discarded)
    assert Counter(Counter(s.group for s in refilled.samples).values()).keys() == {4}  # no question was asked twice
    kept = list(dict.fromkeys(s.group for s in refilled.samples))[:6]  # as `inspect --gradients` reads them
    assert set(kept) == {s.group for s in batch}
    collected = grpo(rollouts_of(0.0), problems, rounds=3).collect(1)
    assert collected.metrics["rollout/refill_rounds"] == 3
    assert len(collected.samples) == 4 * len(collected.batches[0]) == 4 * 24  # the batch keeps its size
    ended = grpo(rollouts_of(0.0), [replace(p, question="1 + 1?") for p in problems[:8]], rounds=50)
    step = ended.collect(1)
    assert step.metrics["rollout/refill_rounds"] == 1
    assert len({s.group for s in step.samples}) == 8


def test_a_step_that_restarts_has_first_weights_and_a_schedule_of_its_own(policy):
    """Bug: STaR learns with the rates of the run's last steps, on from the steps before, or keeps Adam's moments."""
    learner, given = imitating(policy, can_restart=True, lr_schedule="linear"), traces(policy, 3)
    losses = []
    for restart, expected in ((False, [5e-3, 3.75e-3]), (True, [1e-2, 5e-3]), (True, [1e-2, 5e-3])):
        updates = list(learner.updates(Collected([], [given, given], {}, restart=restart), 3, 4, Sampling()))
        assert [u.metrics["train/learning_rate"] for u in updates] == pytest.approx(expected)
        losses.append([u.metrics["train/loss"] for u in updates])
    assert losses[0][0] == losses[1][0] > losses[1][1]
    assert losses[1] == losses[2]
