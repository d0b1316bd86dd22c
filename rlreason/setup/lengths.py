"""Lengths of prompts in tokens, without making tokens of those that are short in any case."""

import json
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from rlreason.model.prompt_encoder import PromptEncoder
from rlreason.types import Problem

#: Normalizer of a tokenizer -> by what factor it can lengthen a text in UTF-8 (Unicode's own figures).
LENGTHENS = {None: 1, "NFC": 3, "NFD": 3}


def lengths(prompt_ids: PromptEncoder, problems: Sequence[Problem], fits: int) -> list[int]:
    """The number of tokens of each prompt, or 0 for one that surely has no more than `fits`.

    Tokens are made of the others alone: a tenth of a millisecond or more for each.
    """
    most = _tokens_a_byte(prompt_ids.policy.tokenizer)
    around = len(prompt_ids.policy.tokenizer.encode("")) + 1  # what the tokenizer puts there, and a space in front
    if most is None:
        return [len(prompt_ids(problem)) for problem in problems]
    longest = (fits - around) // most  # in bytes
    return [0 if _is_short(prompt_ids, p, longest) else len(prompt_ids(p)) for p in problems]


def _is_short(prompt_ids: PromptEncoder, problem: Problem, longest: int) -> bool:
    text = prompt_ids.fill(problem.question) if problem.prompt is None else problem.prompt
    if problem.prompt is None and prompt_ids.chat is not None:
        text = prompt_ids.chat.prompt(text)
    try:
        return len(text.encode()) <= longest
    except UnicodeEncodeError:  # of half a character: what cannot be asked is found now
        return False


def _tokens_a_byte(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """No text has more tokens than this a byte; None where that is not known, as of a tokenizer that rewrites texts.

    A byte-level tokenizer cuts a text's bytes, or those of its normal form, into pieces of one or more.
    """
    core = getattr(tokenizer, "backend_tokenizer", None)
    if core is None:
        return None
    said = json.loads(core.to_str())
    steps = said["pre_tokenizer"] or {}
    kinds = [step["type"] for step in steps.get("pretokenizers", [steps]) if step]
    normalizer = (said["normalizer"] or {}).get("type")
    if said["model"]["type"] != "BPE" or "ByteLevel" not in kinds or set(kinds) - {"ByteLevel", "Split", "Digits"}:
        return None
    return LENGTHENS.get(normalizer)
