"""From the `prompt` settings to text; it knows no tokenizer, and no torch."""

from collections.abc import Callable
from functools import partial

from rlreason.config.groups import PromptConfig
from rlreason.config.store import resource_dir
from rlreason.data.prompts import load_template, render

Render = Callable[[str], str]  # a question -> text


def template_of(prompt: PromptConfig) -> str:
    """The text that a question is filled into: a whole prompt, or the user's turn of a chat."""
    return load_template(prompt.file, resource_dir("prompts"))


def filling(prompt: PromptConfig) -> Render:
    """A question -> that text, filled."""
    return partial(render, template_of(prompt))
