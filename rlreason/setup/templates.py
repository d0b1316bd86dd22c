"""From the `prompt` settings to text, without a tokenizer."""

from collections.abc import Callable
from functools import partial

from rlreason.config.groups import PromptConfig
from rlreason.config.sources import resource_dir
from rlreason.data.prompts import load_template, render
from rlreason.errors import ConfigError

Render = Callable[[str], str]  # a question -> text


def template_of(prompt: PromptConfig) -> str:
    """The text that a question is filled into: a whole prompt, or the user's turn of a chat."""
    try:
        return load_template(prompt.file, resource_dir("prompts"))
    except (OSError, ValueError) as error:  # no permission, no UTF-8
        raise ConfigError(f"prompt.file={prompt.file} cannot be read ({error}): give a text file in UTF-8") from error


def filling(prompt: PromptConfig) -> Render:
    """A question -> that text, filled."""
    return partial(render, template_of(prompt))
