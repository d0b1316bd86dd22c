"""Whether the problems of a run suffice, and fit with their responses: measured before anything slow is loaded.

What is quickly read and measured is, and what is not (a hub's data, a chat, a tokenizer that only transformers can
make) is left to the building of the components, which measures everything and reports it in the same words.
"""

import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from rlreason.config.evaluation import sampling_key
from rlreason.config.groups import PromptConfig
from rlreason.config.model import TINY_CONTEXT
from rlreason.config.run import RunConfig
from rlreason.data.prompts import appended
from rlreason.memory.work import PROMPT
from rlreason.model.tiny_formats import TAGS, VOCABULARY, texts_in, train_tokenizer
from rlreason.setup.data import Loaded, load_data
from rlreason.setup.read_data import read_splits
from rlreason.setup.templates import filling, template_of
from rlreason.setup.warm_start_formats import formats_of
from rlreason.types import Problem

PATIENCE_S = 1.5  # of processor time that all runs of a sweep together may take here; the rest is measured later
MOST_MEASURED = 4_000_000  # characters of prompts that are turned into tokens here
LONGEST_TRIED = 64  # texts, the longest in bytes, among which the longest in tokens is looked for
UNBOUNDED = 1 << 30
CHARACTERS = 3  # of a token at least, in prose
PLAIN = ("TokenizersBackend", "PreTrainedTokenizerFast")  # classes that read tokenizer.json as it stands


class Part(NamedTuple):
    """Problems that are asked in one way."""

    name: str  # train or validation
    prompt: PromptConfig
    problems: list[Problem]
    max_tokens: int  # of a response


def parts(run: RunConfig, train: list[Problem], validation: list[Problem]) -> list[Part]:
    """What must fit. SFT samples no responses to its training problems; its traces are measured when they are made."""
    evaluation, asking = run.evaluation, run.asking
    trained = Part("train", asking.prompt, train, asking.sampling.max_tokens)
    asked = Part("validation", evaluation.prompt, validation, evaluation.sampling.max_tokens)
    return [asked] if run.trains and not run.samples_to_learn else [trained, asked]


def room_of(run: RunConfig, context: int) -> tuple[int, str]:
    """(tokens that a prompt and its response may have together, what bounds them)."""
    return min((run.micro_batch_tokens, "micro_batch_tokens"), (context, "the model's context"))


def too_long(run: RunConfig, name: str, sizes: Sequence[int], max_tokens: int, context: int) -> str:
    """Why prompts of these sizes in tokens cannot be asked; empty where they fit or the long ones are left out."""
    asked, data = name == "validation", run.data if run.eval.data is None else run.eval.data
    own = sampling_key(run, "max_tokens") if asked or not run.trains else "sampling.max_tokens"
    skip = (data if asked else run.data).bad_rows == "skip"
    room, key = room_of(run, context)
    longest = room - max_tokens
    if not sizes or max(sizes) <= longest or (skip and min(sizes) <= longest):
        return ""
    needed, count = max(sizes) + max_tokens, sum(size > longest for size in sizes)
    return (
        f"{own}={max_tokens} and the longest prompt need {needed} tokens, more than "
        f"{key}={room} ({count} of {len(sizes)} {name} prompts): lower {own}"
        + (f", or set {key}={needed}" if key[0] == "m" else "")
        + (
            ""
            if count == len(sizes)
            else f", or leave them out with {'eval.' * (asked and data is not run.data)}data.bad_rows=skip"
        )
    )


class Foreseen:
    """What was read and measured for the runs of a sweep: once where they ask the same."""

    def __init__(self) -> None:
        self._deadline = time.process_time() + PATIENCE_S
        self._loaded: dict[str, Loaded | None] = {}
        self._sizes: dict[str, dict[str, int]] = {}

    def problems(self, run: RunConfig) -> Loaded | None:
        """The problems of a run as it will have them but for the grader's checks; None: not quickly had."""
        asked = (run.asked_at_most, run.problems_on_the_way, run.problems_at_the_end)
        drawn = None if run.data.limit is None else run.seed
        key = repr((type(run), getattr(run, "split", None), run.data, run.eval, run.prompt, asked, drawn))
        if key not in self._loaded and self._in_time():
            quick = run.data.filter == "none" and all(data.quickly_read for data in run.data_read().values())
            self._loaded[key] = load_data(run, say=_quietly) if quick else None
        return self._loaded.get(key)

    def too_long(self, run: RunConfig) -> str:
        """Why the prompts of a run cannot be asked; empty where they fit, or where that is not quickly known."""
        loaded, context = self.problems(run), context_of(run)
        if loaded is None or any(data.bad_gold == "drop" for data in run.data_read().values()):
            return ""
        for part in parts(run, loaded.train, loaded.validation):
            longest = room_of(run, context)[0] - part.max_tokens
            sizes = [] if part.prompt.chat else self._measured(run, texts_of(part), longest)
            if why := too_long(run, part.name, sizes, part.max_tokens, context):
                return why
        return ""

    def _measured(self, run: RunConfig, texts: list[str], longest: int) -> list[int]:
        """The lengths in tokens, 0 for a text that surely fits; nothing where all do, or where it would take long."""
        doubtful = [text for text in texts if len(text.encode()) >= longest]  # a token is a byte or more, and one of
        if sum(map(len, doubtful)) > MOST_MEASURED:  # its own may stand before the text
            return []
        key = repr((run.model.folder or (run.data, run.prompt, run.eval.prompt), hash(tuple(doubtful))))
        if doubtful and key not in self._sizes and self._in_time():
            length = tokenizer_of(run)
            self._sizes[key] = {text: length(text) for text in doubtful} if length else {}
        sizes = self._sizes.get(key)
        return [sizes.get(text, 0) for text in texts] if sizes else []

    def _in_time(self) -> bool:
        return time.process_time() < self._deadline


def _quietly(line: str) -> None:
    """What is left out is said when it is read for the run itself."""


def texts_of(part: Part) -> list[str]:
    """Their prompts as text, in order."""
    fill = filling(part.prompt)
    return [fill(p.question) if p.prompt is None else p.prompt for p in part.problems]


def context_of(run: RunConfig) -> int:
    """Tokens that the model has positions for, as its folder plainly says; where it does not, none is in the way."""
    if run.model.made_on_the_spot:
        return TINY_CONTEXT
    said = _json_in(run.model.folder, "config.json") if run.model.folder else {}
    context = said.get("max_position_embeddings")
    return context if isinstance(context, int) and context > 0 and not said.get("sliding_window") else UNBOUNDED


def tokenizer_of(run: RunConfig) -> Callable[[str], int] | None:
    """A prompt -> its length in tokens, exactly as the policy will encode it; None where only transformers can say."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if run.model.made_on_the_spot:
        core = own_tokenizer(run)
        return lambda text: max(1, len(core.encode(text).ids))
    return saved_tokenizer(run.model.folder) if run.model.folder else None


def own_tokenizer(run: RunConfig) -> Tokenizer:
    """The tokenizer that a model made on the spot gets in this run."""
    core = train_tokenizer(texts_in(formats_of(run), read_splits(run.data, _quietly, traces=False)[0]), VOCABULARY)
    core.add_tokens(list(TAGS))
    return core


def longest_prompt(run: RunConfig) -> int | None:
    """Tokens of the longest prompt, by the texts with most bytes; None where they are not quickly had."""
    loaded = Foreseen().problems(run)
    length = tokenizer_of(run) if loaded else None
    if loaded is None or length is None:
        return None
    texts = [t for part in parts(run, loaded.train, loaded.validation) if not part.prompt.chat for t in texts_of(part)]
    return max(map(length, sorted(texts, key=lambda text: -len(text.encode()))[:LONGEST_TRIED]), default=None)


def assumed_prompt(run: RunConfig) -> int | None:
    """Tokens that a prompt is taken to have where nobody has measured it: a question's, and those of its template.

    None for a model made on the spot, whose prompts are short; characters / 3 where the tokenizer is not here.
    """
    if run.model.made_on_the_spot:
        return None
    length = tokenizer_of(run) or (lambda text: -(-len(text) // CHARACTERS))
    asked = (run.evaluation.prompt, run.asking.prompt)
    return PROMPT + max(length(template_of(prompt)) for prompt in asked)


def saved_tokenizer(folder: str) -> Callable[[str], int] | None:
    """A prompt -> its length under the tokenizer of a model folder; None where only transformers can say."""
    said = _json_in(folder, "tokenizer_config.json")
    if said.get("tokenizer_class") not in PLAIN or any(
        said.get(f"add_{end}_token") is not None for end in ("bos", "eos")
    ):
        return None
    try:
        core = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
    except Exception:  # the library raises this very class; transformers will say what is wrong
        return None
    core.no_truncation()
    core.no_padding()
    behind = appended(core.encode("How many?").ids, core.encode("How many?", add_special_tokens=False).ids)
    begin = said.get("bos_token")
    begin = core.token_to_id(begin.get("content", "") if isinstance(begin, dict) else begin or "")

    def length(text: str) -> int:
        ids = core.encode(text).ids
        twice = len(ids) > 1 and ids[0] == ids[1] == begin  # the text brought its own
        return max(1, len(ids) - twice - behind)

    return length


def _json_in(folder: str, name: str) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        said = json.loads((Path(folder) / name).read_text(encoding="utf-8"))
        return said if isinstance(said, dict) else {}
    return {}
