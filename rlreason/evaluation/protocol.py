"""How an accuracy was measured, as a record with a hash; and whether it follows a leaderboard's rules."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from rlreason.errors import ConfigError
from rlreason.grading.rewards import GRADER_VERSION
from rlreason.records.files import COMPLIANCE
from rlreason.records.reader import RunFolder
from rlreason.runtime.files import write_whole

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


PASS, FAIL, OPEN = "pass", "FAIL", "not verified"
HOURS, GPUS, GPU = 4.0, 2, "H100"
PROBLEMS, TEMPERATURE, MAX_TOKENS = 5000, 1.0, 1024
PARAMETERS = 1_543_714_304  # of Qwen2.5-Math-1.5B, its embeddings counted once
COURSE_REWARD = "cs336_alignment.drgrpo_grader:r1_zero_reward_fn"  # of the handout's repository
#: SHA-256 of the handout's prompt file, "{question}" in the question's place.
R1_ZERO = "56213732da87e12ace60a2b88a16df0af18280fb0563a957cbecc938a6a2ac0e"


class Row(NamedTuple):
    """One rule. `verdict`: PASS, FAIL or OPEN."""

    rule: str
    wanted: str
    found: str
    verdict: str


def leaderboard(settings: Mapping[str, Any], summary: Mapping[str, Any], origin: Mapping[str, Any]) -> list[Row]:
    """CS336's rules of 2025, from a run's `config.yaml`, `summary.json` and `provenance.json`."""
    protocol = summary.get("protocol") or {}
    return [
        _model(origin),
        _data(settings, summary),
        _all_problems(protocol, summary),
        _prompt(protocol),
        _reward(protocol),
        _number("temperature", TEMPERATURE, protocol.get("sampling.temperature")),
        _number("longest response, tokens", MAX_TOKENS, protocol.get("sampling.max_tokens")),
        _number("responses per problem", 1, protocol.get("samples per problem")),
        _traces(settings),
        _hours(summary, origin),
        _gpus(origin),
    ]


def write_card(kind: str | None, folder: Path, summary: Mapping[str, Any]) -> None:
    """Write the card of this kind (`eval.card`) into a run's folder; None: nothing is written."""
    if kind is None:
        return
    run = RunFolder(folder)
    rows = {"leaderboard": leaderboard}[kind](run.settings, summary, run.provenance)
    write_whole(folder / COMPLIANCE, as_text(rows, summary))


def as_text(rows: Sequence[Row], summary: Mapping[str, Any]) -> str:
    """The card as a Markdown table; its last line is the verdict."""
    lines = [f"| {row.rule} | {row.wanted} | {row.found} | {row.verdict} |" for row in rows]
    head = "| rule | wanted | found | verdict |\n| --- | --- | --- | --- |"
    return "\n".join(["# Compliance with the leaderboard's rules\n", head, *lines, "", verdict(rows, summary)]) + "\n"


def verdict(rows: Sequence[Row], summary: Mapping[str, Any]) -> str:
    """The whole card in a line.

    >>> rows = [Row("hours", "at most 4", "5", FAIL), Row("GPUs", "at most 2 H100", "?", OPEN)]
    >>> verdict(rows, {"accuracy": 0.5})
    'leaderboard: FAIL (hours); 1 not verified (GPUs); accuracy 0.500'
    """
    failed, left = ([row.rule for row in rows if row.verdict == of] for of in (FAIL, OPEN))
    word = f"FAIL ({', '.join(failed)})" if failed else f"{sum(row.verdict == PASS for row in rows)} rules pass"
    unsure = [f"{len(left)} not verified ({', '.join(left)})"] if left else []
    accuracy = summary.get("accuracy")
    said = "accuracy unknown" if accuracy is None else f"accuracy {accuracy:.3f}"
    return "; ".join([f"leaderboard: {word}", *unsure, said])


def _model(origin: Mapping[str, Any]) -> Row:
    """The weights' own hash is the only proof, and it is compared by a person: none is known here."""
    model = origin.get("model") or {}
    wanted, size = "Qwen2.5-Math-1.5B", model.get("parameters")
    if size is None:
        return Row("model", wanted, "no facts of a model in provenance.json", OPEN)
    found = f"{size:,} parameters, start weights {model.get('start_weights')}"
    if size != PARAMETERS:
        return Row("model", wanted, f"{found}; it has {PARAMETERS:,}", FAIL)
    return Row("model", wanted, f"{found}: compare these with those of a fresh download", OPEN)


def _data(settings: Mapping[str, Any], summary: Mapping[str, Any]) -> Row:
    data, sizes = settings.get("data") or {}, summary.get("data_sizes") or {}
    wanted = "MATH and no other data"
    if "path" not in data:
        return Row("data", wanted, f"{data.get('name')}, which is made up", FAIL)
    counted = ", ".join(f"{sizes.get(part)} {part}" for part in ("train", "validation"))
    found = f"{data.get('path')}: {counted}, hash {summary.get('data')}"
    other = "; evaluated on eval.data" if (settings.get("eval") or {}).get("data") else ""
    return Row("data", wanted, f"{found}{other}: compare the hash with that of the handout's files", OPEN)


def _all_problems(protocol: Mapping[str, Any], summary: Mapping[str, Any]) -> Row:
    there, asked = (summary.get("data_sizes") or {}).get("validation"), protocol.get("problems")
    holds = asked == there == PROBLEMS
    return Row("problems at the end", f"all {PROBLEMS}", f"{asked} of {there}", PASS if holds else FAIL)


def _prompt(protocol: Mapping[str, Any]) -> Row:
    text = str(protocol.get("prompt", ""))
    digest = hashlib.sha256(text.encode()).hexdigest()
    chat = any(key.startswith("chat.") for key in protocol)
    right = digest == R1_ZERO and protocol.get("stop") == ["</answer>"] and not chat
    found = f"SHA-256 {digest[:12]}, stop {protocol.get('stop')}" + ", in a chat template" * chat
    return Row("prompt", f"r1_zero (SHA-256 {R1_ZERO[:12]}), stop ['</answer>']", found, PASS if right else FAIL)


def _reward(protocol: Mapping[str, Any]) -> Row:
    """The course's own function alone passes: this package's grader decides some pairs otherwise."""
    reward, found = str(protocol.get("reward")), f"{protocol.get('reward')}, grader {protocol.get('grader', '')}"
    if reward == COURSE_REWARD:
        return Row("reward", COURSE_REWARD, found, PASS)
    if ":" in reward:
        return Row("reward", COURSE_REWARD, f"{found}: its code is no part of the protocol", OPEN)
    if reward != "r1_zero" or protocol.get("grading.extract") != "strict":
        return Row("reward", COURSE_REWARD, f"{found}, extract {protocol.get('grading.extract')}", FAIL)
    cure = f"evaluate with eval.reward={COURSE_REWARD}, your checkout on PYTHONPATH"
    return Row("reward", COURSE_REWARD, f"{found}, which decides some answers otherwise: {cure}", OPEN)


def _number(rule: str, wanted: float, found: Any) -> Row:
    return Row(rule, f"{wanted:g}", str(found), PASS if found == wanted else FAIL)


def _traces(settings: Mapping[str, Any]) -> Row:
    wanted, algorithm = "none of a stronger model", settings.get("algorithm")
    if algorithm in ("grpo", "ei"):
        return Row("imitated traces", wanted, f"algorithm={algorithm} learns from its own samples", PASS)
    return Row("imitated traces", wanted, f"algorithm={algorithm}: say where its traces come from", OPEN)


def _hours(summary: Mapping[str, Any], origin: Mapping[str, Any]) -> Row:
    """Of a run that was killed, what came after its checkpoint and the set-up of later parts is not on its clock."""
    seconds = summary.get("time/total")
    if seconds is None:
        return Row("hours", f"at most {HOURS:g}", "no time/total in summary.json", OPEN)
    hours = seconds / 3600
    lost = ", without what was lost where it was interrupted" if origin.get("earlier_parts") else ""
    verdict = FAIL if hours > HOURS else OPEN if lost else PASS
    return Row("hours", f"at most {HOURS:g}", f"{hours:.2f}{lost}", verdict)


def _gpus(origin: Mapping[str, Any]) -> Row:
    """Of every part of a resumed run. Which of several visible ones were used is not recorded."""
    wanted = f"at most {GPUS} {GPU}"
    devices = [part.get("device") or {} for part in (*origin.get("earlier_parts", []), origin)]
    if any("type" not in device for device in devices):
        return Row("GPUs", wanted, "not recorded of every part of the run", OPEN)
    cards = [device for device in devices if device["type"] != "cpu"]
    if not cards:
        return Row("GPUs", wanted, "none", PASS)
    found = "; ".join(dict.fromkeys(f"{card.get('count')} x {card.get('name')}" for card in cards))
    if any(GPU not in str(card.get("name")) for card in cards):
        return Row("GPUs", wanted, f"{found}: a measure on other cards", OPEN)
    if all((card.get("count") or GPUS + 1) <= GPUS for card in cards):
        return Row("GPUs", wanted, found, PASS)
    return Row("GPUs", wanted, f"{found} visible: set CUDA_VISIBLE_DEVICES to those that are used", OPEN)
