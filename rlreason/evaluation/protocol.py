"""The protocol of an accuracy, as a record with a hash, and a card of its compliance with a leaderboard's rules."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from os.path import commonprefix
from pathlib import Path
from typing import Any

from rlreason.config.leaves import flat
from rlreason.grading.grader import GRADER_VERSION
from rlreason.records.files import COMPLIANCE
from rlreason.records.reader import RunFolder
from rlreason.runtime.files import write_whole

Protocol = dict[str, Any]

#: The source of a response's random numbers; another rule would draw other samples from the same seed.
SEED_RULE = "blake2b(run seed, eval, problem id), then the sample's number"
SHOWN_CHARS = 40  # of a long text, from the first difference


def make_protocol(parts: Mapping[str, Any]) -> Protocol:
    """Return the parts, groups of settings by dotted names, and their hash.

    >>> one = make_protocol({"prompt": "{question}", "sampling": {"temperature": 1.0}})
    >>> two = make_protocol({"prompt": "{question}", "sampling": {"temperature": 0.7}})
    >>> len(one["hash"]), differences(one, two)
    (8, ['sampling.temperature: 1.0 and 0.7'])
    """
    protocol: Protocol = flat(parts)
    digest = hashlib.sha256(json.dumps(protocol, sort_keys=True).encode()).hexdigest()
    return protocol | {"hash": digest[:8]}


def grader_version() -> str:
    """Return the versions of the grading rules and of the library behind them.

    A verifier that comes with the data is part of these rules. A user's reward is not: the protocol has its name,
    `module:function`, but not its code, so rename it when it grades differently.
    """
    return f"{GRADER_VERSION}, math-verify {version('math-verify')}"


def differences(one: Protocol, two: Protocol) -> list[str]:
    """Return the differences between two protocols, one line each; of long texts from their first difference."""
    lines = []
    for name in dict.fromkeys((*one, *two)):
        a, b = one.get(name), two.get(name)
        if name == "hash" or a == b:
            continue
        if isinstance(a, str) and isinstance(b, str) and max(len(a), len(b)) > SHOWN_CHARS:
            start = max(0, len(commonprefix([a, b])) - 10)  # noqa: RUF071  # of characters
            a, b = (repr(text[start : start + SHOWN_CHARS]) for text in (a, b))
        lines.append(f"{name}: {' and '.join('nothing' if value is None else str(value) for value in (a, b))}")
    return lines


def format_accuracy(
    accuracy: float, low: float, high: float, protocol: Protocol, questions: float | None = None
) -> str:
    """Format an accuracy for quoting: with its 95% interval, its number of problems and its protocol.

    `questions`: the number of different questions, where some problems repeat one.

    >>> format_accuracy(0.31, 0.252, 0.377, {"problems": 200, "samples per problem": 1, "hash": "3f2a91c0"})
    'accuracy 0.310 (0.252-0.377), 200 problems, protocol 3f2a91c0'
    """
    each = protocol["samples per problem"]
    asked = f"{protocol['problems']} problems" + (f" that ask {questions:.0f} questions" if questions else "")
    asked += f" x {each} samples" if each > 1 else ""
    return f"accuracy {accuracy:.3f} ({low:.3f}-{high:.3f}), {asked}, protocol {protocol['hash']}"


PASS, FAIL, OPEN = "pass", "FAIL", "not verified"
HOURS, GPUS, GPU = 4.0, 2, "H100"
PROBLEMS = 5000
PARAMETERS = 1_543_714_304  # of Qwen2.5-Math-1.5B, its embeddings counted once
COURSE_REWARD = "cs336_alignment.drgrpo_grader:r1_zero_reward_fn"  # of the handout's repository
#: SHA-256 of the handout's prompt file, "{question}" in the question's place.
R1_ZERO = "56213732da87e12ace60a2b88a16df0af18280fb0563a957cbecc938a6a2ac0e"
Facts = Mapping[str, Any]


def leaderboard(settings: Facts, summary: Facts, origin: Facts) -> list[tuple[str, str, str, str]]:
    """Check CS336's rules of 2025 on a run's `config.yaml`, `summary.json` and `provenance.json`.

    Returns (rule, what is wanted, what is found, PASS, FAIL or OPEN) of each.

    Of the model only the size is checked: the weights' hash, the sole proof, is for a person to compare. Only the
    course's own reward passes: our grader decides some pairs differently. A killed run's clock lacks the time after
    its checkpoint, and the records do not say which of the visible GPUs were used.
    """
    protocol, data, model = summary["protocol"], settings["data"], origin["model"]
    asked, there = protocol["problems"], summary["data_sizes"]["validation"]
    digest, stop = hashlib.sha256(protocol["prompt"].encode()).hexdigest(), protocol["stop"]
    is_plain = stop == ["</answer>"] and not any(key.startswith("chat.") for key in protocol)
    reward, extract, size = protocol["reward"], protocol.get("grading.extract"), model["parameters"]
    other_reward = ":" in reward or (reward == "r1_zero" and extract == "strict")
    algorithm, seconds = settings["algorithm"], summary["time/total"]
    parts = [*origin.get("earlier_parts", []), origin]
    in_time = seconds <= 3600 * HOURS and (len(parts) == 1 or OPEN)
    cards = [(of["count"], of["name"]) for of in (part["device"] for part in parts) if of["type"] != "cpu"]
    are_few = all(count <= GPUS and GPU in name for count, name in cards)
    data_hash = f"{data.get('path', data['name'])}, hash {summary['data']}"
    own_data = settings["eval"]["data"]
    temperature, longest = protocol["sampling.temperature"], protocol["sampling.max_tokens"]
    each = protocol["samples per problem"]
    rows: list[tuple[str, str, object, bool | str]] = [
        ("model", "Qwen2.5-Math-1.5B, freshly downloaded", (size, model["start_weights"]), size == PARAMETERS and OPEN),
        ("data", "MATH alone, as in the handout's files", (data_hash, own_data), "path" in data and OPEN),
        ("problems at the end", f"all {PROBLEMS}", f"{asked} of {there}", asked == there == PROBLEMS),
        ("prompt", f"r1_zero, {R1_ZERO[:12]}", (digest[:12], stop), digest == R1_ZERO and is_plain),
        ("reward", COURSE_REWARD, (reward, extract), reward == COURSE_REWARD or (other_reward and OPEN)),
        ("temperature", "1", temperature, temperature == 1),
        ("longest response, tokens", "1024", longest, longest == 1024),
        ("responses per problem", "1", each, each == 1),
        ("imitated traces", "none of a stronger model", algorithm, algorithm in ("grpo", "ei") or OPEN),
        ("hours", f"at most {HOURS:g}", f"{seconds / 3600:.2f} in {len(parts)} parts", in_time),
        ("GPUs", f"at most {GPUS} {GPU}", cards or "none", are_few or OPEN),
    ]
    verdicts = {True: PASS, False: FAIL, OPEN: OPEN}
    return [(rule, wanted, str(found), verdicts[verdict]) for rule, wanted, found, verdict in rows]


def write_card(folder: Path, summary: Facts) -> None:
    """Write the card of a run into its folder."""
    run = RunFolder(folder)
    write_whole(folder / COMPLIANCE, card_text(leaderboard(run.settings, summary, run.provenance), summary))


def card_text(rows: Sequence[tuple[str, str, str, str]], summary: Facts) -> str:
    """Format the card as a Markdown table; its last line is the verdict.

    >>> rows = [("hours", "at most 4", "5", FAIL), ("GPUs", "at most 2 H100", "?", OPEN)]
    >>> print(card_text(rows, {"accuracy": 0.5}).splitlines()[-1])
    leaderboard: FAIL (hours); not verified (GPUs); accuracy 0.500
    """
    by = {verdict: ", ".join(rule for rule, *_, held in rows if held == verdict) for verdict in (FAIL, OPEN)}
    result = "; ".join(f"{verdict} ({rules})" for verdict, rules in by.items() if rules) or "every rule passes"
    head = "# Compliance with the leaderboard's rules\n\n| rule | wanted | found | verdict |\n| --- | --- | --- | --- |"
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([head, *lines, "", f"leaderboard: {result}; accuracy {summary['accuracy']:.3f}"]) + "\n"
