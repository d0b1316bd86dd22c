"""Signs in training samples that a reward is earned by something else than right answers, or that texts get lost.

They are looked at behind every step, so they are cheap: nothing is asked of the grader's processes.
"""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from rlreason.evaluation.votes import common_answer
from rlreason.grading import Grader
from rlreason.grading.formats import FORMATS
from rlreason.grading.ground_truth import reference_answers
from rlreason.types import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEXTS = 32  # of a step that are turned into tokens and back


def stated(response: str) -> str | None:
    """The answer that a response states in any of the known formats; None where it states none.

    >>> stated("so </think> <answer> 38</answer>"), stated("it is 38")
    ('38', None)
    """
    answers = (form.read(response).answer for form in FORMATS.values())
    return next((answer.strip() for answer in answers if answer is not None and answer.strip()), None)


def signs_of(
    samples: Sequence[Sample], truths: Mapping[str, str], grader: Grader, tokenizer: "PreTrainedTokenizerBase"
) -> dict[str, float]:
    """Metrics of the samples of a step; `truths`: problem id -> ground truth.

    `rollout/same_answer`, `_right`: the share of responses with the commonest answer, and of problems that it is right
    for. `reward/unconfirmed`: the share of all reward that responses without the right answer earn.
    `rollout/round_trip`: the share of prompts and responses that stay the same as tokens and back.
    """
    if not samples:
        return {}
    asked = [truths.get(problem, "") for problem in dict.fromkeys(s.group for s in samples)]
    signs = common_answer([stated(s.text) for s in samples], asked, grader.same, "rollout")
    own_rules = grader.plugin is not None and grader.plugin.startswith(
        "rlreason."
    )  # a verifier: its truths are no answers
    if not own_rules and (total := sum(max(0.0, s.grade.reward) for s in samples)):
        unearned = sum(s.grade.reward for s in samples if s.grade.reward > 0 and not confirmed(s, truths, grader))
        signs["reward/unconfirmed"] = unearned / total
    return signs | {"rollout/round_trip": round_trip(samples, tokenizer)}


def confirmed(sample: Sample, truths: Mapping[str, str], grader: Grader) -> bool:
    """Whether a rewarded response is right: by its grade, or by the exact rules where the reward is one's own."""
    if not grader.plugin:
        return sample.grade.outcome == "correct"
    answer = stated(sample.text)
    references = reference_answers(truths.get(sample.group)) or ()
    return answer is not None and any(grader.same(answer, reference) for reference in references)


def round_trip(samples: Sequence[Sample], tokenizer: "PreTrainedTokenizerBase") -> float:
    """The share of prompts and responses, of a few of them, whose text is the same after encoding and decoding."""

    def text_of(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    some = list(islice(samples, 0, None, max(1, len(samples) // (TEXTS // 2))))
    texts = [text_of(ids) for s in some for ids in (s.response.prompt_ids, s.response.token_ids)]
    same = sum(text_of(tokenizer.encode(text, add_special_tokens=False)) == text for text in texts)
    return same / len(texts)
