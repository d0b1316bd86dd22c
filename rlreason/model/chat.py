"""Convert a problem to the token ids of its prompt, by a template or the model's own chat template."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlreason.config.groups import PromptConfig
from rlreason.config.leaves import prompt_renderer, template_of
from rlreason.config.run import RunConfig, each_prompt
from rlreason.errors import ConfigError
from rlreason.model.parameters import load_tokenizer
from rlreason.model.policy import Policy
from rlreason.runtime.text import first_line
from rlreason.types import Problem

#: A user's turn that shows what a template changes: lines, spaces, quotes, brackets, many words. Not at its ends, which
#: templates may trim.
WRITTEN = 'How?\n\n  A "B" & <b>c</b>\\boxed{} {{d}} %s \u00e9' + " and so on" * 1000 + ": what is X?"

#: Some templates state today's date. A fixed one, so that a run has the same prompts every day.
TODAY = datetime(2024, 7, 26)  # Llama 3's default date

CURE = "set prompt.system=null, or choose another model, or a prompt without a chat template (prompt=r1_zero)"


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

    def check(self) -> None:
        """Raise `ConfigError` if the template is missing or does not support the settings."""
        if self.enable_thinking is not None and "enable_thinking" not in self.template:
            raise ConfigError(
                f"prompt.enable_thinking={str(self.enable_thinking).lower()}: this model's chat template has no such "
                "switch: leave it out (prompt.enable_thinking=null), or choose a model that has it, such as Qwen3"
            )
        prompt = self.text(user=WRITTEN)
        if WRITTEN not in prompt or (self.system or "").strip() not in prompt:
            raise ConfigError(
                f"prompt.chat=true, prompt.system={self.system!r}: this model's chat template leaves out or alters the "
                f"text of a turn: {CURE}"
            )

    def text(self, **turns: str) -> str:
        """Return these turns by role behind the system message, with special tokens as text: encode it without more.

        Without a turn of the assistant it is a prompt.
        """
        if self.system is not None:
            turns = {"system": self.system} | turns
        settings: dict[str, Any] = {"chat_template": self.template, "add_generation_prompt": "assistant" not in turns}
        if self.enable_thinking is not None:
            settings["enable_thinking"] = self.enable_thinking
        messages = [{"role": role, "content": content} for role, content in turns.items()]
        clock = TODAY.strftime  # replaces the template's
        try:
            return str(self.tokenizer.apply_chat_template(messages, tokenize=False, strftime_now=clock, **settings))
        except Exception as error:  # a template may raise anything
            raise ConfigError(
                f"prompt.chat=true, prompt.system={self.system!r}: this model's chat template refuses that "
                f"({first_line(error)}): {CURE}"
            ) from error


class PromptEncoder:
    """A problem -> the token ids of its prompt: its own verbatim, or the filled template."""

    def __init__(self, policy: Policy, prompt: PromptConfig) -> None:
        self.policy, self.chat = policy, chat_of(prompt, policy.tokenizer)
        self.fill = prompt_renderer(prompt.file)  # question -> text of the prompt, or of the user's turn in a chat

    def check(self, problems: Sequence[Problem]) -> None:
        """Raise `ConfigError` if a chat's user would write a control token of the chat, such as the end of a turn."""
        if self.chat is None:
            return
        frame, end_ids = self.chat.text(user=""), self.policy.end_ids
        added = self.policy.tokenizer.added_tokens_decoder.items()
        control = [str(token) for i, token in added if token.special and (str(token) in frame or i in end_ids)]
        for problem in problems:
            text = self.fill(problem.question) if problem.prompt is None else ""
            if found := [token for token in control if token in text]:
                raise ConfigError(
                    f"prompt.chat=true: the user's turn of problem {problem.id} holds {found[0]}, a token of the chat "
                    "itself and no text: remove it from the question, or from prompt.file"
                )

    def __call__(self, problem: Problem) -> list[int]:
        """Return token ids, including those that the tokenizer or the chat template adds."""
        if problem.prompt is not None or self.chat is None:
            return self.policy.encode_prompt(self.fill(problem.question) if problem.prompt is None else problem.prompt)
        text = self.chat.text(user=self.fill(problem.question))
        return self.policy.checked_ids(self.policy.tokenizer.encode(text, add_special_tokens=False))


PromptIds = Callable[[Problem], list[int]]


def chat_of(prompt: PromptConfig, tokenizer: PreTrainedTokenizerBase) -> Chat | None:
    """Return the model's chat template with the prompt's settings; None if the prompt is no chat."""
    return Chat(tokenizer, prompt.system, prompt.enable_thinking) if prompt.chat else None


def check_prompts(run: RunConfig) -> None:
    """Raise `ConfigError` if a chat cannot be made. This loads the tokenizer, never the weights."""

    def check(prompt: PromptConfig) -> None:
        if prompt.chat and run.model.folder is not None:
            Chat(load_tokenizer(run.model.folder), prompt.system, prompt.enable_thinking).check()

    each_prompt(run, check)


def end_of_turn(prompt: PromptConfig, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the special token that the chat template puts after an assistant's turn, if there is one.

    It ends a response, and a base model's folder may not name it.
    """
    if (chat := chat_of(prompt, tokenizer)) is None:
        return None
    after = chat.text(user="How many?", assistant="It is 42.").rpartition("42.")[2].lstrip()
    first = tokenizer.encode(after, add_special_tokens=False)[:1]
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    return first[0] if first and first[0] in special else None


def prompt_facts(prompt: PromptConfig, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return all that can make two prompts of a question differ, for a protocol: the templates, a chat's settings."""
    facts: dict[str, Any] = {"prompt": template_of(prompt.file), "chat": {}}
    if (chat := chat_of(prompt, tokenizer)) is not None:
        facts["chat"] = {
            "prompt": chat.text(user="{user}"),
            "template": hashlib.sha256(chat.template.encode()).hexdigest()[:16],
            "system": prompt.system,
            "enable_thinking": prompt.enable_thinking,
        }
    return facts


def remarks(prompt: PromptConfig, problems: Sequence[Problem]) -> list[str]:
    """Warn about problems that bring their whole prompt, which does not end as the template would."""
    tail = "\0" if prompt.chat else prompt_renderer(prompt.file)("\0").rpartition("\0")[2]
    count = sum(p.prompt is not None and not p.prompt.endswith(tail) for p in problems)
    if not count:
        return []
    return [
        f"! {count} of {len(problems)} problems bring their whole prompt, which is taken word for word and not through "
        "the template: if it is a question, say so with data.fields.question=prompt"
    ]
