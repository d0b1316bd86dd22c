"""How an accuracy was measured: everything that would change the number while the model stays the same.

Two accuracies may be compared, averaged or drawn into one curve only where their protocols are equal. A protocol is
a plain dict, ready for JSON, with a short hash that is printed next to every accuracy. The run's seed is no part of
it: seeds are what one averages over.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from rlreason.errors import ConfigError
from rlreason.grading.version import GRADER_VERSION

Protocol = dict[str, Any]

#: Where the random numbers of a response come from; another rule would draw other samples from the same seed.
SEED_RULE = "blake2b(run seed, eval, problem id), then the sample's number"
SHOWN_CHARS = 40  # of a long text, from where two of them differ


def make_protocol(
    *,
    prompt: str,
    reward: str,
    grading: Mapping[str, Any],
    sampling: Mapping[str, Any],
    stop: Sequence[str],
    data: str,
    problems: int,
    samples: int,
    chat: Mapping[str, Any] | None = None,
) -> Protocol:
    """The parts in reading order, and their hash. `data` is a hash of the problems that are asked, `chat` what is to
    be said of the chat template that the prompt is put into, where there is one.

    >>> parts = dict(prompt="{question}", reward="r1_zero", grading={"extract": "strict"}, stop=[], data="a1")
    >>> one = make_protocol(**parts, sampling={"temperature": 1.0}, problems=2, samples=1)
    >>> two = make_protocol(**parts, sampling={"temperature": 0.7}, problems=2, samples=1)
    >>> len(one["hash"]), differences(one, two)
    (8, ['sampling.temperature: 1.0 and 0.7'])
    """
    parts = {
        "prompt": prompt,
        **{f"chat.{key}": value for key, value in (chat or {}).items()},
        "reward": reward,
        "grader": grader_version(),
        **{f"grading.{key}": value for key, value in grading.items()},
        **{f"sampling.{key}": value for key, value in sampling.items()},
        "stop": list(stop),
        "seeds": SEED_RULE,
        "data": data,
        "problems": problems,
        "samples per problem": samples,
    }
    text = json.dumps(parts, sort_keys=True)
    return {**parts, "hash": hashlib.sha256(text.encode()).hexdigest()[:8]}


def grader_version() -> str:
    """The version of the rules that grade, and of the library behind them: other rules, other numbers.

    A verifier that comes with the data is part of these rules. A reward of the user's own is not: the protocol knows
    it by its name, `module:function`, and nothing of its code, so give it another name when it judges otherwise.
    """
    return f"{GRADER_VERSION}, math-verify {version('math-verify')}"


def differences(one: Protocol, two: Protocol) -> list[str]:
    """What differs between two protocols, one line each; empty when they are the same."""
    names = [name for name in dict.fromkeys((*one, *two)) if name != "hash" and one.get(name) != two.get(name)]
    return [f"{name}: {' and '.join(_shown(one.get(name), two.get(name)))}" for name in names]


def refuse_mixture(protocols: Mapping[str, Protocol], allow: bool = False) -> list[str]:
    """For what is about to be drawn or averaged together, by name: what differs, as text.

    Anything that differs is refused, unless `allow`; then the text belongs next to the picture.
    """
    names = list(protocols)
    found = [
        f"{names[0]} and {name} were measured differently: {'; '.join(different)}"
        for name in names[1:]
        if (different := differences(protocols[names[0]], protocols[name]))
    ]
    if found and not allow:
        raise ConfigError(f"{found[0]}: measure both in one way")
    return found


def format_accuracy(
    accuracy: float, low: float, high: float, protocol: Protocol, questions: float | None = None
) -> str:
    """An accuracy as it should be quoted: with its 95% interval, its number of problems and its protocol.

    `questions`: how many different ones the problems ask, where some are repeated.

    >>> format_accuracy(0.31, 0.252, 0.377, {"problems": 200, "samples per problem": 1, "hash": "3f2a91c0"})
    'accuracy 0.310 (0.252-0.377), 200 problems, protocol 3f2a91c0'
    """
    each = protocol["samples per problem"]
    asked = f"{protocol['problems']} problems" + (f" that ask {questions:.0f} questions" if questions else "")
    asked += f" x {each} samples" if each > 1 else ""
    return f"accuracy {accuracy:.3f} ({low:.3f}-{high:.3f}), {asked}, protocol {protocol['hash']}"


def _shown(one: Any, two: Any) -> tuple[str, str]:
    """Both values; long texts from where they part."""
    if not (isinstance(one, str) and isinstance(two, str)) or max(len(one), len(two)) <= SHOWN_CHARS:
        return _word(one), _word(two)
    parting = next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))
    start = max(0, parting - 10)

    def window(text: str) -> str:
        end = start + SHOWN_CHARS
        return ("..." if start else "") + repr(text[start:end])[1:-1] + ("..." if end < len(text) else "")

    return f"'{window(one)}'", f"'{window(two)}'"


def _word(value: Any) -> str:
    return "nothing" if value is None else str(value)
