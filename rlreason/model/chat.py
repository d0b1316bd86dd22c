"""Convert a problem to the token ids of its prompt, by a template or the model's own chat template; their lengths."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlreason.config.evaluation import naming_eval_settings
from rlreason.config.groups import PromptConfig
from rlreason.config.leaves import prompt_renderer, template_of
from rlreason.config.model import ModelConfig
from rlreason.config.run import RunConfig
from rlreason.errors import ConfigError
from rlreason.model.loading import load_tokenizer
from rlreason.model.policy import Policy
from rlreason.runtime.text import first_line
from rlreason.types import Problem

MARK = "How many are 19 and 23?"  # a message to look for in a prompt; templates trim whitespace at its ends

#: A user's turn that shows what a template changes: lines, spaces, quotes, brackets, many words.
WRITTEN = f'{MARK}\n\n  A "B" & <b>c</b>\\boxed{{}} {{{{d}}}} %s \u00e9' + " and so on" * 1000 + ": what is X?"

#: Some templates state today's date. A fixed one, so that a run has the same prompts every day.
TODAY = datetime(2024, 7, 26)  # Llama 3's default date


@dataclass(frozen=True, slots=True)
class Chat:
    """A tokenizer's chat template and the settings chosen for it. Call `check` once before the first prompt."""

    tokenizer: PreTrainedTokenizerBase
    system: str | None = None  # the system message; None: none, or the template's default
    enable_thinking: bool | None = None  # None: the template's own default

    @property
    def template(self) -> str:
        """The template's text; of several, the one without tools. `ConfigError` if the model has none."""
        try:
            return self.tokenizer.get_chat_template()
        except ValueError as error:
            raise ConfigError(
                "prompt.chat=true: this model has no chat template, as base models do not: choose an instruct model, "
                "or a prompt without one (prompt=r1_zero)"
            ) from error

    def prompt(self, user: str) -> str:
        """Return the prompt for one user's turn with its special tokens as text: encode it without adding any."""
        return self._text([{"role": "user", "content": user}], add_generation_prompt=True)

    def end_of_turn(self) -> int | None:
        """The id of the special token that the template puts after an assistant's turn; None if there is none."""
        turns = [{"role": "user", "content": MARK}, {"role": "assistant", "content": f"{MARK} 42."}]
        after = self._text(turns).rpartition("42.")[2].lstrip()
        first = self.tokenizer.encode(after, add_special_tokens=False)[:1]
        special = {*self.tokenizer.all_special_ids, *self.tokenizer.added_tokens_decoder}
        return first[0] if first and first[0] in special else None

    def describe(self) -> dict[str, Any]:
        """Describe everything that can make two prompts of the same user's turn differ, for evaluation protocols."""
        return {
            "prompt": self.prompt("{user}"),
            "template": hashlib.sha256(self.template.encode()).hexdigest()[:16],
            "system": self.system,
            "enable_thinking": self.enable_thinking,
        }

    def check(self) -> None:
        """Raise `ConfigError` if the template is missing or does not support the settings."""
        if self.enable_thinking is not None and "enable_thinking" not in self.template:
            raise ConfigError(
                f"prompt.enable_thinking={str(self.enable_thinking).lower()}: this model's chat template has no such "
                "switch: leave it out (prompt.enable_thinking=null), or choose a model that has it, such as Qwen3"
            )
        prompt = self.prompt(MARK)
        if MARK not in prompt:
            raise ConfigError(
                "prompt.chat=true: this model's chat template leaves the user's turn out: choose another model, or a "
                "prompt without a chat template"
            )
        if WRITTEN not in self.prompt(WRITTEN):
            raise ConfigError(
                "prompt.chat=true: this model's chat template alters what a user writes (spaces, case, length): "
                "choose another model, or a prompt without a chat template"
            )
        user = [{"role": "user", "content": MARK}]
        answered = self._text([*user, {"role": "assistant", "content": "It is 42."}]).rpartition("It is 42.")[0]
        if prompt == self._text(user) and answered.startswith(prompt) and answered[len(prompt) :].strip():
            begins = answered[len(prompt) :].strip()
            raise ConfigError(
                "prompt.chat=true: this model's chat template ignores add_generation_prompt, so that a prompt lacks "
                f"what begins an answer ({begins!r}): mend the template, or choose another model"
            )
        if self.system is not None and self.system.strip() not in prompt:
            raise ConfigError(
                f"prompt.system={self.system!r}: this model's chat template leaves it out: set prompt.system=null, "
                "and say it in the user's turn (prompt.file=FILE)"
            )

    def _text(self, turns: list[dict[str, str]], add_generation_prompt: bool = False) -> str:
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        choices: dict[str, Any] = {"strftime_now": TODAY.strftime}  # replaces the template's clock
        if self.enable_thinking is not None:
            choices["enable_thinking"] = self.enable_thinking
        template = self.template
        try:
            text = self.tokenizer.apply_chat_template(
                [*system, *turns],
                chat_template=template,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **choices,
            )
        except Exception as error:  # a template may raise anything
            cure = "choose another model, or a prompt without a chat template"
            if self.system is not None:
                cure = "set prompt.system=null, and say it in the user's turn (prompt.file=FILE)"
            raise ConfigError(
                f"prompt.chat=true, prompt.system={self.system!r}: this model's chat template refuses that "
                f"({first_line(error)}): {cure}"
            ) from error
        return str(text)


@dataclass(frozen=True, slots=True)
class PromptEncoder:
    """A problem -> the token ids of its prompt: its own verbatim, or the filled template."""

    policy: Policy
    fill: Callable[[str], str]  # question -> text of the prompt, or of the user's turn in a chat
    chat: Chat | None = None

    def check(self, problems: Sequence[Problem]) -> None:
        """Raise `ConfigError` if a chat's user would write a control token of the chat, such as the end of a turn."""
        if self.chat is None:
            return
        tokenizer, frame = self.policy.tokenizer, self.chat.prompt("")
        written = {i: str(token) for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        shapes = sorted(text for i, text in written.items() if text in frame or i in self.policy.end_ids)
        for problem in (p for p in problems if p.prompt is None):
            text = self.fill(problem.question)
            if found := next((token for token in shapes if token in text), None):
                raise ConfigError(
                    f"prompt.chat=true: the user's turn of problem {problem.id} holds {found}, which is a token of the "
                    "chat itself and no text: remove it from the question, or from prompt.file"
                )

    def __call__(self, problem: Problem) -> list[int]:
        """Return token ids, including those that the tokenizer or the chat template adds."""
        if problem.prompt is not None:
            return self.policy.encode_prompt(problem.prompt)
        text = self.fill(problem.question)
        if self.chat is None:
            return self.policy.encode_prompt(text)
        return self.policy.checked_ids(self.policy.tokenizer.encode(self.chat.prompt(text), add_special_tokens=False))


PromptIds = Callable[[Problem], list[int]]


def check_prompt(prompt: PromptConfig, model: ModelConfig) -> None:
    """Raise `ConfigError` if prompts cannot be made; for a chat this loads the tokenizer, never the weights."""
    template_of(prompt.file)
    if prompt.chat:
        assert model.folder is not None, "a model made on the spot has no chat template"
        chat_of(prompt, load_tokenizer(model.folder)).check()


def check_prompts(run: RunConfig) -> None:
    """Check the prompts of training, and those of evaluations if they differ."""
    if run.asking.prompt is run.prompt:
        check_prompt(run.prompt, run.model)
    if run.eval.prompt is not None:
        with naming_eval_settings(run, "prompt"):
            check_prompt(run.eval.prompt, run.model)


def chat_of(prompt: PromptConfig, tokenizer: PreTrainedTokenizerBase) -> Chat:
    """Return the model's chat template with the prompt's settings."""
    return Chat(tokenizer, prompt.system, prompt.enable_thinking)


def encoder(policy: Policy, prompt: PromptConfig) -> PromptEncoder:
    """Return the encoder of these prompts: a problem -> the token ids of its prompt."""
    return PromptEncoder(
        policy, prompt_renderer(prompt.file), chat_of(prompt, policy.tokenizer) if prompt.chat else None
    )


def end_of_turn(prompt: PromptConfig, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the token that ends a response in a chat, which a base model's folder may not name."""
    return chat_of(prompt, tokenizer).end_of_turn() if prompt.chat else None


def prompt_facts(prompt: PromptConfig, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Describe the prompt for a protocol: the template's text, and the chat template, if any."""
    return {"prompt": template_of(prompt.file), "chat": chat_of(prompt, tokenizer).describe() if prompt.chat else {}}


def remarks(prompt: PromptConfig, problems: Sequence[Problem]) -> list[str]:
    """Warn about problems that bring their whole prompt."""
    count = sum(p.prompt is not None for p in problems)
    if not prompt.chat or not count:
        return []
    return [
        f"! {count} of {len(problems)} problems bring their whole prompt, which is taken word for word and not through "
        "the chat template: if it is a question, say so with data.fields.question=prompt"
    ]


#: A tokenizer's normalizer -> the most it can lengthen a text in UTF-8, as a factor (Unicode's own figures).
LENGTHENS = {None: 1, "NFC": 3, "NFD": 3}


def lengths(prompt_ids: PromptEncoder, problems: Sequence[Problem], fits: int) -> list[int]:
    """Count the tokens of each prompt, or return 0 for one that certainly has no more than `fits`.

    Only the others are tokenized, which takes a tenth of a millisecond or more each.
    """
    most = _tokens_a_byte(prompt_ids.policy.tokenizer)
    around = len(prompt_ids.policy.tokenizer.encode("")) + 1  # the tokenizer's additions, and a leading space
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
    except UnicodeEncodeError:  # of half a character: a prompt that cannot be encoded fails here
        return False


def _tokens_a_byte(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Upper bound on a text's tokens per byte; None if unknown, as for a tokenizer that rewrites texts.

    A byte-level tokenizer cuts a text's bytes, or those of its normal form, into pieces of one or more.
    """
    core = getattr(tokenizer, "backend_tokenizer", None)
    if core is None:
        return None
    specification = json.loads(core.to_str())
    steps = specification["pre_tokenizer"] or {}
    kinds = [step["type"] for step in steps.get("pretokenizers", [steps]) if step]
    normalizer = (specification["normalizer"] or {}).get("type")
    if (
        specification["model"]["type"] != "BPE"
        or "ByteLevel" not in kinds
        or set(kinds) - {"ByteLevel", "Split", "Digits"}
    ):
        return None
    return LENGTHENS.get(normalizer)
