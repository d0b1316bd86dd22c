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
Facts = Mapping[str, Any]


class RuleCheck(NamedTuple):
    """The check of one rule. `verdict`: PASS, FAIL or OPEN."""

    rule: str
    wanted: str
    found: str
    verdict: str


def leaderboard(settings: Facts, summary: Facts, origin: Facts) -> list[RuleCheck]:
    """Check CS336's rules of 2025 on a run's `config.yaml`, `summary.json` and `provenance.json`."""
    protocol, sizes, rows = summary.get("protocol") or {}, summary.get("data_sizes") or {}, list[RuleCheck]()

    def check(rule: str, wanted: str, found: str, verdict: str | bool) -> None:
        if isinstance(verdict, bool):
            verdict = PASS if verdict else FAIL
        rows.append(RuleCheck(rule, wanted, found, verdict))

    check("model", "Qwen2.5-Math-1.5B", *_model(origin.get("model") or {}))
    data, found = settings.get("data") or {}, f"{sizes.get('train')} train, {sizes.get('validation')} validation"
    found = f"{data.get('path')}: {found}, hash {summary.get('data')}"
    found += "; evaluated on eval.data" if (settings.get("eval") or {}).get("data") else ""
    if "path" in data:
        check("data", "MATH and no other data", f"{found}: compare the hash with that of the handout's files", OPEN)
    else:
        check("data", "MATH and no other data", f"{data.get('name')}, which is made up", FAIL)
    available, asked = sizes.get("validation"), protocol.get("problems")
    check("problems at the end", f"all {PROBLEMS}", f"{asked} of {available}", asked == available == PROBLEMS)
    digest = hashlib.sha256(str(protocol.get("prompt", "")).encode()).hexdigest()
    chat, stop = any(key.startswith("chat.") for key in protocol), protocol.get("stop")
    found = f"SHA-256 {digest[:12]}, stop {stop}" + (", in a chat template" if chat else "")
    right = digest == R1_ZERO and stop == ["</answer>"] and not chat
    check("prompt", f"r1_zero (SHA-256 {R1_ZERO[:12]}), stop ['</answer>']", found, right)
    check("reward", COURSE_REWARD, *_reward(protocol))
    for rule, key, limit in LIMITS:
        check(rule, f"{limit:g}", str(protocol.get(key)), protocol.get(key) == limit)
    algorithm = settings.get("algorithm")
    own = algorithm in ("grpo", "ei")
    found = f"algorithm={algorithm}" + (" learns from its own samples" if own else ": say where its traces come from")
    check("imitated traces", "none of a stronger model", found, PASS if own else OPEN)
    check("hours", f"at most {HOURS:g}", *_hours(summary.get("time/total"), origin))
    check("GPUs", f"at most {GPUS} {GPU}", *_gpus(origin))
    return rows


def _model(model: Facts) -> tuple[str, str]:
    """Check the size only: the weights' hash, the sole proof, is for a person to compare, since none is known here."""
    size = model.get("parameters")
    if size is None:
        return "no facts of a model in provenance.json", OPEN
    found = f"{size:,} parameters, start weights {model.get('start_weights')}"
    if size != PARAMETERS:
        return f"{found}; it has {PARAMETERS:,}", FAIL
    return f"{found}: compare these with those of a fresh download", OPEN


def _reward(protocol: Protocol) -> tuple[str, str]:
    """Check the reward. Only the course's own function passes: our grader decides some pairs differently."""
    reward, found = str(protocol.get("reward")), f"{protocol.get('reward')}, grader {protocol.get('grader', '')}"
    if reward == COURSE_REWARD:
        return found, PASS
    if ":" in reward:
        return f"{found}: its code is no part of the protocol", OPEN
    if reward != "r1_zero" or protocol.get("grading.extract") != "strict":
        return f"{found}, extract {protocol.get('grading.extract')}", FAIL
    cure = f"evaluate with eval.reward={COURSE_REWARD}, your checkout on PYTHONPATH"
    return f"{found}, which decides some answers otherwise: {cure}", OPEN


def _hours(seconds: float | None, origin: Facts) -> tuple[str, str]:
    """Check the time. A killed run's clock lacks the time after its checkpoint and the set-up of later parts."""
    if seconds is None:
        return "no time/total in summary.json", OPEN
    lost = ", without what was lost where it was interrupted" if origin.get("earlier_parts") else ""
    return f"{seconds / 3600:.2f}{lost}", FAIL if seconds / 3600 > HOURS else OPEN if lost else PASS


def _gpus(origin: Facts) -> tuple[str, str]:
    """Check the GPUs of every part of a resumed run. The records do not say which of the visible ones were used."""
    devices = [part.get("device") or {} for part in (*origin.get("earlier_parts", []), origin)]
    if any("type" not in device for device in devices):
        return "not recorded of every part of the run", OPEN
    cards = [device for device in devices if device["type"] != "cpu"]
    found = "; ".join(dict.fromkeys(f"{card.get('count')} x {card.get('name')}" for card in cards)) or "none"
    if any(GPU not in str(card.get("name")) for card in cards):
        return f"{found}: a measure on other cards", OPEN
    if all((card.get("count") or GPUS + 1) <= GPUS for card in cards):
        return found, PASS
    return f"{found} visible: set CUDA_VISIBLE_DEVICES to those that are used", OPEN


def write_card(kind: str | None, folder: Path, summary: Facts) -> None:
    """Write the card of this kind (`eval.card`) into a run's folder; None: write nothing."""
    if kind is not None:
        run = RunFolder(folder)
        rows = {"leaderboard": leaderboard}[kind](run.settings, summary, run.provenance)
        write_whole(folder / COMPLIANCE, card_text(rows, summary))


def card_text(rows: Sequence[RuleCheck], summary: Facts) -> str:
    """Format the card as a Markdown table; its last line is the verdict.

    >>> rows = [RuleCheck("hours", "at most 4", "5", FAIL), RuleCheck("GPUs", "at most 2 H100", "?", OPEN)]
    >>> print(card_text(rows, {"accuracy": 0.5}).splitlines()[-1])
    leaderboard: FAIL (hours); 1 not verified (GPUs); accuracy 0.500
    """
    failed, unsure = ([row.rule for row in rows if row.verdict == of] for of in (FAIL, OPEN))
    result = f"FAIL ({', '.join(failed)})" if failed else f"{sum(row.verdict == PASS for row in rows)} rules pass"
    result += f"; {len(unsure)} not verified ({', '.join(unsure)})" if unsure else ""
    accuracy = summary.get("accuracy")
    measured = "unknown" if accuracy is None else f"{accuracy:.3f}"
    head = "# Compliance with the leaderboard's rules\n\n| rule | wanted | found | verdict |\n| --- | --- | --- | --- |"
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([head, *lines, "", f"leaderboard: {result}; accuracy {measured}"]) + "\n"
