"""What a scripted server answers: a script read from JSON, with its programs, and which of its answers is whose."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rlreason.errors import ConfigError
from rlreason.runtime.text import first_line

PROBLEMS = Path(__file__).with_name("problems")
MODEL = "scripted"
PROBLEM = "kissing_11"  # whose programs have short names
_CUT_CODE = (
    "A larger set, built step by step:\n\n```python\ndef run_code():\n    points = []\n    for i in range(11):\n"
)
_NO_CODE = "The axes give 22 vectors. Vectors with four entries of size 1 leave room for many more of them."
_THOUGHT = "Vectors of norm 4 with four entries are at a distance of at least 2 where they share two places at most."
_BROKEN = "<html><body>502 Bad Gateway</body></html>"

#: The kinds of answers, and the fields that each may have: its type and what it is where it is left out.
KINDS: dict[str, dict[str, tuple[type | tuple[type, ...], Any]]] = {
    "program": {"file": (str, None), "source": ((str, list), None), "say": (str, "A program:"), "after": (str, "")},
    "text": {"content": ((str, list), ""), "reasoning": (str, ""), "finish_reason": (str, "stop")},
    "no_code": {"content": (str, _NO_CODE)},
    "truncated": {"content": (str, _CUT_CODE)},
    "empty": {},
    "thinking_only": {"reasoning": (str, _THOUGHT)},
    "status": {"code": (int, 500), "message": (str, "scripted"), "retry_after": ((int, float, str), None),
               "location": (str, None)},
    "slow": {"seconds": ((int, float), 1.0), "then": (dict, {"kind": "no_code"})},
    "drip": {"seconds": ((int, float), 1.0), "headers": (bool, False)},  # a byte each time, without end
    "broken": {"content": (str, _BROKEN)},
    "raw": {"body": ((str, dict, list), ""), "headers": (dict, {})},
    "large": {"megabytes": (int, 40)},
    "hang_up": {},  # the connection ends without an answer
}  # fmt: skip

Answer = Mapping[str, Any]


class Reply(NamedTuple):
    """What a model would have said."""

    content: str | list[Any]
    reasoning: str = ""
    finish_reason: str = "stop"


@dataclass(frozen=True)
class Script:
    """The answers to one question after the other, each with those to its repetitions; `samples` questions a turn."""

    entries: tuple[tuple[Answer, ...], ...]
    samples: int = 1
    _flat: tuple[Answer, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_flat", tuple(answer for entry in self.entries for answer in entry))

    def to(self, turn: int, sample: int, attempt: int) -> Answer:
        """The answer to the `attempt`-th request (from 1) for a sample (from 0) of a turn (from 1).

        After the last entry the first comes again; the last answer of an entry is given for every further attempt.
        """
        entry = self.entries[((turn - 1) * self.samples + sample) % len(self.entries)]
        return entry[min(max(attempt, 1), len(entry)) - 1]

    def arriving(self, number: int) -> Answer:
        """The answer to the `number`-th request (from 0) of a client that does not say which question it asks."""
        return self._flat[number % len(self._flat)]


def read_script(told: Any, folder: Path, name: str = "the script") -> Script:
    """A script from what its JSON says: a list of entries, or {"samples": n, "replies": [...]}.

    An entry is one answer or a list of them, an answer {"kind": ..., ...} with the fields of `KINDS`. Programs are
    read: from `source`, or from `file`, which is the name of a shipped example, PROBLEM/NAME or a path from `folder`.
    `ConfigError` for anything else.
    """
    whole = told if isinstance(told, dict) else {"replies": told}
    replies, samples = whole.get("replies"), whole.get("samples", 1)
    if not isinstance(replies, list) or not replies or type(samples) is not int or samples < 1:
        raise ConfigError(f'{name} is no script: write a list of answers, or {{"samples": 4, "replies": [...]}}')
    entries = []
    for number, entry in enumerate(replies):
        answers = entry if isinstance(entry, list) else [entry]
        if not answers:
            raise ConfigError(f"{name}: entry {number} holds no answer: give it one")
        entries.append(tuple(_checked(answer, folder, f"{name}: entry {number}") for answer in answers))
    return Script(tuple(entries), samples)


def script_file(path: Path) -> Script:
    """The script in a file of JSON. `ConfigError` where it cannot be read."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"SCRIPT={path} cannot be read ({first_line(error)}): give a file of JSON") from error
    return read_script(told, path.parent, str(path))


def reply_of(answer: Answer) -> Reply:
    """The reply of an answer that is one."""
    match answer["kind"]:
        case "program":
            code = answer["source"]
            fence = "````" if "```" in code else "```"
            after = f"\n{answer['after']}\n" if answer["after"] else ""
            return Reply(f"{answer['say']}\n\n{fence}python\n{code.strip()}\n{fence}\n{after}")
        case "text":
            return Reply(answer["content"], answer["reasoning"], answer["finish_reason"])
        case "no_code":
            return Reply(answer["content"])
        case "truncated":
            return Reply(answer["content"], finish_reason="length")
        case "thinking_only":
            return Reply("", answer["reasoning"], "length")
        case _:
            return Reply("")


def completion(answer: Answer, request_id: str, asked: Mapping[str, Any]) -> tuple[bytes, str]:
    """The body that holds an answer's reply, and its content type: a stream of events where `asked` asks for one.

    Tokens are a quarter of the characters, so that they are the same each time.
    """
    reply = reply_of(answer)
    told = reply.content if isinstance(reply.content, str) else json.dumps(reply.content)
    prompt, said = len(json.dumps(asked.get("messages"))) // 4, (len(told) + len(reply.reasoning)) // 4
    usage = {"prompt_tokens": prompt, "completion_tokens": said, "total_tokens": prompt + said}
    common = {"id": f"{MODEL}-{request_id}", "created": 0, "model": asked.get("model", MODEL)}
    thinking = {"reasoning_content": reply.reasoning} if reply.reasoning else {}
    if asked.get("stream") is not True:
        message = {"role": "assistant", "content": reply.content, **thinking}
        choices: list[dict[str, Any]] = [{"index": 0, "message": message, "finish_reason": reply.finish_reason}]
        whole = {**common, "object": "chat.completion", "choices": choices, "usage": usage}
        return json.dumps(whole).encode(), "application/json"
    pieces: list[dict[str, Any]] = [thinking] if thinking else []
    pieces += [{"content": told[at : at + 100]} for at in range(0, len(told), 100)]
    choices = [{"index": 0, "delta": piece, "finish_reason": None} for piece in pieces]
    choices.append({"index": 0, "delta": {}, "finish_reason": reply.finish_reason})
    events = [{**common, "object": "chat.completion.chunk", "choices": [choice]} for choice in choices]
    events.append({**common, "object": "chat.completion.chunk", "choices": [], "usage": usage})
    lines = [*map(json.dumps, events), "[DONE]"]
    return "".join(f"data: {line}\n\n" for line in lines).encode(), "text/event-stream"


def _checked(answer: Any, folder: Path, where: str) -> Answer:
    """The answer with all of its fields, and with the source of its program."""
    kind = answer.get("kind") if isinstance(answer, dict) else None
    if not isinstance(kind, str) or kind not in KINDS:
        raise ConfigError(f"{where}: kind={kind!r:.80} is none of {', '.join(KINDS)}: correct it")
    fields = KINDS[kind]
    for name, value in answer.items():
        if name != "kind" and (name not in fields or not isinstance(value, fields[name][0])):
            raise ConfigError(f"{where}: {name}={value!r:.80} does not belong to {kind}: it takes {', '.join(fields)}")
    whole = {"kind": kind, **{name: default for name, (_, default) in fields.items()}, **answer}
    if kind == "slow":
        whole["then"] = _checked(whole["then"], folder, f"{where}: then")
    if kind == "program":
        source = whole["source"]
        lines = "\n".join(map(str, source)) if isinstance(source, list) else source
        whole["source"] = lines if lines is not None else _program(whole["file"], folder, where)
    return whole


def _program(name: str | None, folder: Path, where: str) -> str:
    """The source of a shipped program or of a file."""
    if not name:
        raise ConfigError(f"{where}: a program needs its file or its source: give one")
    problem, _, short = name.rpartition("/")
    home = PROBLEMS / (problem or PROBLEM)
    for path in (home / "examples" / f"{short}.py", home / f"{short}.py", folder / name):
        if path.is_file():
            return path.read_text(encoding="utf-8")
    shipped = ", ".join(sorted(path.stem for path in (PROBLEMS / PROBLEM / "examples").glob("*.py")))
    raise ConfigError(f"{where}: file={name} is no program: give a path from {folder}, or one of starter, {shipped}")
