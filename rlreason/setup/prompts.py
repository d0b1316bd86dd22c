"""From the `prompt` settings to the prompts of problems: text for people and protocols, token ids for engines."""

import re
from collections.abc import Callable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlreason.config.groups import PromptConfig
from rlreason.config.model import ModelConfig, PretrainedModelConfig
from rlreason.errors import ConfigError
from rlreason.model.chat import Chat
from rlreason.model.policy import Policy, load_tokenizer
from rlreason.model.prompt_encoder import PromptEncoder
from rlreason.setup.templates import filling, template_of
from rlreason.types import Problem

PromptIds = Callable[[Problem], list[int]]


def check_prompt(prompt: PromptConfig, model: ModelConfig, key: str = "prompt") -> None:
    """`ConfigError` where the prompts cannot be made; before the weights are loaded, of a chat with the tokenizer.

    `key`: where these settings stand, `prompt` or `eval.prompt`.
    """
    template_of(prompt)
    if prompt.chat:
        assert isinstance(model, PretrainedModelConfig), "a model made on the spot has no chat template"
        try:
            chat_of(prompt, load_tokenizer(model.folder)).check()
        except ConfigError as error:
            raise ConfigError(re.sub(r"\bprompt(?=[.=])", key, str(error))) from error


def chat_of(prompt: PromptConfig, tokenizer: PreTrainedTokenizerBase) -> Chat:
    return Chat(tokenizer, prompt.system, prompt.enable_thinking)


def encoder(policy: Policy, prompt: PromptConfig) -> PromptEncoder:
    """A problem -> the token ids of its prompt, by these settings."""
    return PromptEncoder(policy, filling(prompt), chat_of(prompt, policy.tokenizer) if prompt.chat else None)


def end_of_turn(prompt: PromptConfig, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The token that ends a response to a chat: a model's folder need not name it, as a base model's does not."""
    return chat_of(prompt, tokenizer).end_of_turn() if prompt.chat else None


def asked_how(prompt: PromptConfig, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """What a protocol says of the prompt: the file's text, and the chat template that it went through, if any."""
    return {"prompt": template_of(prompt), "chat": chat_of(prompt, tokenizer).describe() if prompt.chat else {}}


def remarks(prompt: PromptConfig, problems: Sequence[Problem]) -> list[str]:
    """What should be said before the run about problems that bring their whole prompt."""
    count = sum(p.prompt is not None for p in problems)
    if not prompt.chat or not count:
        return []
    return [
        f"! {count} of {len(problems)} problems bring their whole prompt, which is taken word for word and not through "
        "the chat template: if it is a question, say so with data.fields.question=prompt"
    ]
