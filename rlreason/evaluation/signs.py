"""Signs in training samples that a reward is earned by something else than right answers, or that texts get lost.

They are looked at behind every step, so they are cheap: nothing is asked of the grader's processes.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rlreason.evaluation.votes import common_answer
from rlreason.grading import Grader
from rlreason.grading.formats import FORMATS
from rlreason.grading.ground_truth import reference_answers
from rlreason.monitors.seen import FEWEST_ASKED
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

    `rollout/right`: the share of responses that state the right answer, whatever they earn. `rollout/same_answer`,
    `_right`: the share of responses with the commonest answer, and of problems that it is right for. Neither is there
    for verifiers, whose truths are no answers, and the last two only where enough problems were asked.
    `rollout/round_trip`: the share of texts that stay the same as tokens and back.
    """
    if not samples:
        return {}
    signs: dict[str, float] = {}
    verifies = grader.plugin is not None and grader.plugin.startswith("rlreason.")  # then its truths are no answers
    if not verifies:
        signs["rollout/right"] = sum(states_the_truth(s, truths, grader) for s in samples) / len(samples)
    asked = [truths.get(problem, "") for problem in dict.fromkeys(s.group for s in samples)]
    comparable = not verifies and (grader.plugin is None or signs["rollout/right"] > 0)
    if comparable and len(asked) >= FEWEST_ASKED:
        signs |= common_answer([stated(s.text) for s in samples], asked, grader.same, "rollout")
    return signs | {"rollout/round_trip": round_trip(samples, tokenizer)}


def states_the_truth(sample: Sample, truths: Mapping[str, str], grader: Grader) -> bool:
    """Whether a response states the right answer: by its grade, or by the exact rules where the reward is one's own."""
    if not grader.plugin:
        return sample.grade.outcome == "correct"
    answer = stated(sample.text)
    references = reference_answers(truths.get(sample.group)) or ()
    return answer is not None and any(grader.same(answer, reference) for reference in references)


def round_trip(samples: Sequence[Sample], tokenizer: "PreTrainedTokenizerBase") -> float:
    """The share of prompts, or of responses where that is less, whose text is the same after encoding and decoding.

    A few of them are looked at. Spaces are not: many tokenizers add or drop one beside a special token.
    """

    def text_of(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    def again(text: str) -> str:
        return text_of(tokenizer.encode(text, add_special_tokens=False))

    def share(texts: list[str]) -> float:
        return sum("".join(again(text).split()) == "".join(text.split()) for text in texts) / len(texts)

    some = [s.response for s in samples[:: -(-len(samples) // TEXTS)]]
    return min(share([text_of(r.prompt_ids) for r in some]), share([text_of(r.token_ids) for r in some]))
