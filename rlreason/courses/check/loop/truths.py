"""What reward_fn was asked: for the response that was sampled, with the ground truth of its own question?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rlreason.courses.check.loop.recording import RecordedSample
from rlreason.courses.check.subject import Bug

_CALL = "the call of reward_fn: what is handed to it as response and as ground truth"


def of_truths(
    function: str,
    samples: Sequence[RecordedSample],
    judgements: Sequence[tuple[str, str]],
    truths: Sequence[str],
    told: dict[str, str],
) -> Iterator[Bug]:
    """Responses that were judged, but never with their own question's ground truth: the first one."""
    asked = set(judgements)
    texts = {text for text, _ in judgements}
    for s in samples:
        if (s.text, s.truth) in asked or (s.text.strip(), s.truth) in asked:
            continue
        kind, yours = _kind(s, judgements, texts, truths), ""
        if s.text in texts and "swapped" not in kind:
            yours = f"judged by {next(truth for text, truth in judgements if text == s.text)!r}"
        elif "swapped" not in kind:
            yours = f"judged text {next((text for text, truth in judgements if truth == s.truth), 'nothing')!r}"
        more = told | {"response": repr(s.text), "its ground truth": repr(s.truth)}
        yield Bug(function, kind, _CALL, more, yours, "this response judged by this ground truth")
        return


def _kind(s: RecordedSample, judgements: Sequence[tuple[str, str]], texts: set[str], truths: Sequence[str]) -> str:
    if any(truth == s.text for _, truth in judgements):
        return "reward_fn gets ground truth and response in swapped places"
    if s.text in texts:
        other = next(truth for text, truth in judgements if text == s.text)
        if other in truths:
            return "answers are misaligned: a response is judged by another question's ground truth"
        return "reward_fn gets something else than the question's ground truth"
    if any(text.endswith(s.text) and len(text) > len(s.text) for text, truth in judgements if truth == s.truth):
        return "the reward is not asked for the text that was sampled: prompt and response are handed over together"
    return "the reward is not asked for the text that was sampled"
