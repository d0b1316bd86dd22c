"""The protocol of an accuracy, as a record with a hash, and a card of its compliance with a leaderboard's rules."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from rlreason.errors import ConfigError
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
    protocol: Protocol = {}
    for name, part in parts.items():
        if isinstance(part, Mapping):
            protocol |= {f"{name}.{key}": value for key, value in part.items()}
        else:
            protocol[name] = part
    text = json.dumps(protocol, sort_keys=True)
    return {**protocol, "hash": hashlib.sha256(text.encode()).hexdigest()[:8]}


def grader_version() -> str:
    """Return the versions of the grading rules and of the library behind them.

    A verifier that comes with the data is part of these rules. A user's reward is not: the protocol has its name,
    `module:function`, but not its code, so rename it when it grades differently.
    """
    return f"{GRADER_VERSION}, math-verify {version('math-verify')}"


def differences(one: Protocol, two: Protocol) -> list[str]:
    """Return the differences between two protocols, one line each; of long texts from their first difference."""
    names = [name for name in dict.fromkeys((*one, *two)) if name != "hash" and one.get(name) != two.get(name)]
    lines = []
    for name in names:
        a, b = one.get(name), two.get(name)
        if isinstance(a, str) and isinstance(b, str) and max(len(a), len(b)) > SHOWN_CHARS:
            parting = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            a, b = (_window(text, max(0, parting - 10)) for text in (a, b))
        lines.append(f"{name}: {' and '.join('nothing' if value is None else str(value) for value in (a, b))}")
    return lines


def _window(text: str, start: int) -> str:
    """Return SHOWN_CHARS characters of a text from `start`, quoted."""
    end = start + SHOWN_CHARS
    return f"'{'...' if start else ''}{repr(text[start:end])[1:-1]}{'...' if end < len(text) else ''}'"


def refuse_mixture(protocols: Mapping[str, Protocol], allow: bool = False) -> list[str]:
    """Check that accuracies to be drawn or averaged together have one protocol; return the differences as text.

    Differences are refused unless `allow`; then the text belongs next to the picture.
    """
    names = list(protocols)
    lines = [
        f"{names[0]} and {name} were measured differently: {'; '.join(different)}"
        for name in names[1:]
        if (different := differences(protocols[names[0]], protocols[name]))
    ]
    if lines and not allow:
        raise ConfigError(f"{lines[0]}: measure both in one way")
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
#: (rule, its key in the protocol, the number that it must be)
LIMITS = (
    ("temperature", "sampling.temperature", 1.0),
    ("longest response, tokens", "sampling.max_tokens", 1024),
    ("responses per problem", "samples per problem", 1),
)
PARAMETERS = 1_543_714_304  # of Qwen2.5-Math-1.5B, its embeddings counted once
COURSE_REWARD = "cs336_alignment.drgrpo_grader:r1_zero_reward_fn"  # of the handout's repository
#: SHA-256 of the handout's prompt file, "{question}" in the question's place.
R1_ZERO = "56213732da87e12ace60a2b88a16df0af18280fb0563a957cbecc938a6a2ac0e"


class RuleCheck(NamedTuple):
    """The check of one rule. `verdict`: PASS, FAIL or OPEN."""

    rule: str
    wanted: str
    found: str
    verdict: str


def leaderboard(settings: Mapping[str, Any], summary: Mapping[str, Any], origin: Mapping[str, Any]) -> list[RuleCheck]:
    """Check CS336's rules of 2025 on a run's `config.yaml`, `summary.json` and `provenance.json`."""
    protocol = summary.get("protocol") or {}
    return [
        _model(origin),
        _data(settings, summary),
        _problems(protocol, summary),
        _prompt(protocol),
        _reward(protocol),
        *(
            _passes(rule, f"{limit:g}", str(protocol.get(key)), protocol.get(key) == limit)
            for rule, key, limit in LIMITS
        ),
        _traces(settings),
        _hours(summary, origin),
        _gpus(origin),
    ]


def _passes(rule: str, wanted: str, found: str, passes: bool) -> RuleCheck:
    return RuleCheck(rule, wanted, found, PASS if passes else FAIL)


def write_card(kind: str | None, folder: Path, summary: Mapping[str, Any]) -> None:
    """Write the card of this kind (`eval.card`) into a run's folder; None: write nothing."""
    if kind is not None:
        run = RunFolder(folder)
        rows = {"leaderboard": leaderboard}[kind](run.settings, summary, run.provenance)
        write_whole(folder / COMPLIANCE, card_text(rows, summary))


def card_text(rows: Sequence[RuleCheck], summary: Mapping[str, Any]) -> str:
    """Format the card as a Markdown table; its last line is the verdict."""
    lines = [f"| {row.rule} | {row.wanted} | {row.found} | {row.verdict} |" for row in rows]
    head = "| rule | wanted | found | verdict |\n| --- | --- | --- | --- |"
    return "\n".join(["# Compliance with the leaderboard's rules\n", head, *lines, "", verdict(rows, summary)]) + "\n"


def verdict(rows: Sequence[RuleCheck], summary: Mapping[str, Any]) -> str:
    """Return the whole card as one line.

    >>> rows = [RuleCheck("hours", "at most 4", "5", FAIL), RuleCheck("GPUs", "at most 2 H100", "?", OPEN)]
    >>> verdict(rows, {"accuracy": 0.5})
    'leaderboard: FAIL (hours); 1 not verified (GPUs); accuracy 0.500'
    """
    failed, left = ([row.rule for row in rows if row.verdict == of] for of in (FAIL, OPEN))
    result = f"FAIL ({', '.join(failed)})" if failed else f"{sum(row.verdict == PASS for row in rows)} rules pass"
    unsure = [f"{len(left)} not verified ({', '.join(left)})"] if left else []
    accuracy = summary.get("accuracy")
    measured = "accuracy unknown" if accuracy is None else f"accuracy {accuracy:.3f}"
    return "; ".join([f"leaderboard: {result}", *unsure, measured])


def _model(origin: Mapping[str, Any]) -> RuleCheck:
    """Check the size only: the weights' hash, the sole proof, is for a person to compare, since none is known here."""
    model = origin.get("model") or {}
    wanted, size = "Qwen2.5-Math-1.5B", model.get("parameters")
    if size is None:
        return RuleCheck("model", wanted, "no facts of a model in provenance.json", OPEN)
    found = f"{size:,} parameters, start weights {model.get('start_weights')}"
    if size != PARAMETERS:
        return RuleCheck("model", wanted, f"{found}; it has {PARAMETERS:,}", FAIL)
    return RuleCheck("model", wanted, f"{found}: compare these with those of a fresh download", OPEN)


def _data(settings: Mapping[str, Any], summary: Mapping[str, Any]) -> RuleCheck:
    data, sizes = settings.get("data") or {}, summary.get("data_sizes") or {}
    wanted = "MATH and no other data"
    if "path" not in data:
        return RuleCheck("data", wanted, f"{data.get('name')}, which is made up", FAIL)
    counted = ", ".join(f"{sizes.get(part)} {part}" for part in ("train", "validation"))
    found = f"{data.get('path')}: {counted}, hash {summary.get('data')}"
    other = "; evaluated on eval.data" if (settings.get("eval") or {}).get("data") else ""
    return RuleCheck("data", wanted, f"{found}{other}: compare the hash with that of the handout's files", OPEN)


def _problems(protocol: Protocol, summary: Mapping[str, Any]) -> RuleCheck:
    there, asked = (summary.get("data_sizes") or {}).get("validation"), protocol.get("problems")
    return _passes("problems at the end", f"all {PROBLEMS}", f"{asked} of {there}", asked == there == PROBLEMS)


def _prompt(protocol: Protocol) -> RuleCheck:
    digest = hashlib.sha256(str(protocol.get("prompt", "")).encode()).hexdigest()
    chat, stop = any(key.startswith("chat.") for key in protocol), protocol.get("stop")
    found = f"SHA-256 {digest[:12]}, stop {stop}" + (", in a chat template" if chat else "")
    wanted = f"r1_zero (SHA-256 {R1_ZERO[:12]}), stop ['</answer>']"
    return _passes("prompt", wanted, found, digest == R1_ZERO and stop == ["</answer>"] and not chat)


def _traces(settings: Mapping[str, Any]) -> RuleCheck:
    rule, wanted, algorithm = "imitated traces", "none of a stronger model", settings.get("algorithm")
    if algorithm in ("grpo", "ei"):
        return RuleCheck(rule, wanted, f"algorithm={algorithm} learns from its own samples", PASS)
    return RuleCheck(rule, wanted, f"algorithm={algorithm}: say where its traces come from", OPEN)


def _reward(protocol: Protocol) -> RuleCheck:
    """Check the reward. Only the course's own function passes: our grader decides some pairs differently."""
    reward, found = str(protocol.get("reward")), f"{protocol.get('reward')}, grader {protocol.get('grader', '')}"
    if reward == COURSE_REWARD:
        return RuleCheck("reward", COURSE_REWARD, found, PASS)
    if ":" in reward:
        return RuleCheck("reward", COURSE_REWARD, f"{found}: its code is no part of the protocol", OPEN)
    if reward != "r1_zero" or protocol.get("grading.extract") != "strict":
        return RuleCheck("reward", COURSE_REWARD, f"{found}, extract {protocol.get('grading.extract')}", FAIL)
    cure = f"evaluate with eval.reward={COURSE_REWARD}, your checkout on PYTHONPATH"
    return RuleCheck("reward", COURSE_REWARD, f"{found}, which decides some answers otherwise: {cure}", OPEN)


def _hours(summary: Mapping[str, Any], origin: Mapping[str, Any]) -> RuleCheck:
    """Check the time. A killed run's clock lacks the time after its checkpoint and the set-up of later parts."""
    seconds = summary.get("time/total")
    if seconds is None:
        return RuleCheck("hours", f"at most {HOURS:g}", "no time/total in summary.json", OPEN)
    hours = seconds / 3600
    lost = ", without what was lost where it was interrupted" if origin.get("earlier_parts") else ""
    return RuleCheck(
        "hours", f"at most {HOURS:g}", f"{hours:.2f}{lost}", FAIL if hours > HOURS else OPEN if lost else PASS
    )


def _gpus(origin: Mapping[str, Any]) -> RuleCheck:
    """Check the GPUs of every part of a resumed run. The records do not say which of the visible ones were used."""
    wanted = f"at most {GPUS} {GPU}"
    devices = [part.get("device") or {} for part in (*origin.get("earlier_parts", []), origin)]
    if any("type" not in device for device in devices):
        return RuleCheck("GPUs", wanted, "not recorded of every part of the run", OPEN)
    cards = [device for device in devices if device["type"] != "cpu"]
    if not cards:
        return RuleCheck("GPUs", wanted, "none", PASS)
    found = "; ".join(dict.fromkeys(f"{card.get('count')} x {card.get('name')}" for card in cards))
    if any(GPU not in str(card.get("name")) for card in cards):
        return RuleCheck("GPUs", wanted, f"{found}: a measure on other cards", OPEN)
    if all((card.get("count") or GPUS + 1) <= GPUS for card in cards):
        return RuleCheck("GPUs", wanted, found, PASS)
    return RuleCheck("GPUs", wanted, f"{found} visible: set CUDA_VISIBLE_DEVICES to those that are used", OPEN)
