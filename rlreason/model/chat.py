"""A model's own chat template: a user's turn -> the whole prompt, up to where the assistant's turn begins."""

import hashlib
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlreason.errors import ConfigError
from rlreason.runtime.text import first_line

MARK = "How many are 19 and 23?"  # a message to look for in a prompt; templates trim whitespace at its ends

#: What a user may write, for what a template does to it: lines, spaces, quotes, brackets, many words.
WRITTEN = f'{MARK}\n\n  A "B" & <b>c</b>\\boxed{{}} {{{{d}}}} %s \u00e9' + " and so on" * 1000 + ": what is X?"

#: Some templates state today's date. A fixed one, so that a run has the same prompts on every day.
TODAY = datetime(2024, 7, 26)  # the day that Llama 3's template falls back to


@dataclass(frozen=True, slots=True)
class Chat:
    """The chat template of a tokenizer and the choices made for it. Call `check` once before the first prompt."""

    tokenizer: PreTrainedTokenizerBase
    system: str | None = None  # the system message; None: none, or the one that the template puts there by itself
    enable_thinking: bool | None = None  # None: the template's own default

    @property
    def template(self) -> str:
        """The template's text; of several, the one without tools. `ConfigError` where the model has none."""
        try:
            return self.tokenizer.get_chat_template()
        except ValueError as error:
            raise ConfigError(
                "prompt.chat=true: this model has no chat template, as base models do not: choose an instruct model, "
                "or a prompt without one (prompt=r1_zero)"
            ) from error

    def prompt(self, user: str) -> str:
        """The prompt for one user's turn with its special tokens as text: encode it without adding any."""
        return self._text([{"role": "user", "content": user}], add_generation_prompt=True)

    def end_of_turn(self) -> int | None:
        """The id of the special token that the template puts after an assistant's turn; None where it puts none."""
        turns = [{"role": "user", "content": MARK}, {"role": "assistant", "content": f"{MARK} 42."}]
        after = self._text(turns).rpartition("42.")[2].lstrip()
        first = self.tokenizer.encode(after, add_special_tokens=False)[:1]
        special = {*self.tokenizer.all_special_ids, *self.tokenizer.added_tokens_decoder}
        return first[0] if first and first[0] in special else None

    def describe(self) -> dict[str, Any]:
        """For an evaluation protocol: everything by which two prompts of the same user's turn may differ."""
        return {
            "prompt": self.prompt("{user}"),
            "template": hashlib.sha256(self.template.encode()).hexdigest()[:16],
            "system": self.system,
            "enable_thinking": self.enable_thinking,
        }

    def check(self) -> None:
        """`ConfigError` where the template is missing or does not support what was chosen."""
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
        choices: dict[str, Any] = {"strftime_now": TODAY.strftime}  # in place of the function that knows the real date
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
