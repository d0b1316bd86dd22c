"""From the `prompt` settings to the prompts of problems: text for people and protocols, token ids for engines."""

from collections.abc import Callable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlreason.config.evaluation import asked_by
from rlreason.config.groups import PromptConfig
from rlreason.config.model import ModelConfig
from rlreason.config.run import RunConfig
from rlreason.model.chat import Chat
from rlreason.model.loading import load_tokenizer
from rlreason.model.policy import Policy
from rlreason.model.prompt_encoder import PromptEncoder
from rlreason.setup.templates import filling, template_of
from rlreason.types import Problem

PromptIds = Callable[[Problem], list[int]]


def check_prompt(prompt: PromptConfig, model: ModelConfig) -> None:
    """`ConfigError` where the prompts cannot be made; before the weights are loaded, of a chat with the tokenizer."""
    template_of(prompt)
    if prompt.chat:
        assert model.folder is not None, "a model made on the spot has no chat template"
        chat_of(prompt, load_tokenizer(model.folder)).check()


def check_prompts(run: RunConfig) -> None:
    """The prompts of training, and those of evaluations where they differ."""
    if run.asking.prompt is run.prompt:
        check_prompt(run.prompt, run.model)
    if run.eval.prompt is not None:
        with asked_by(run, "prompt"):
            check_prompt(run.eval.prompt, run.model)


def chat_of(prompt: PromptConfig, tokenizer: PreTrainedTokenizerBase) -> Chat:
    """The chat template of the model, with the choices that the settings make for it."""
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
