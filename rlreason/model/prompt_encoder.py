"""From a problem to the token ids of its prompt."""

from collections.abc import Callable
from dataclasses import dataclass

from rlreason.model.chat import Chat
from rlreason.model.policy import Policy
from rlreason.types import Problem


@dataclass(frozen=True, slots=True)
class PromptEncoder:
    """A problem -> the token ids of its prompt: the one that came with it word for word, or a filled template's."""

    policy: Policy
    fill: Callable[[str], str]  # a question -> the text of the prompt, or of the user's turn in a chat
    chat: Chat | None = None

    def __call__(self, problem: Problem) -> list[int]:
        """Token ids, with what the tokenizer or the chat template puts around the text."""
        if problem.prompt is not None:
            return self.policy.encode_prompt(problem.prompt)
        text = self.fill(problem.question)
        if self.chat is None:
            return self.policy.encode_prompt(text)
        return self.policy.known(self.policy.tokenizer.encode(self.chat.prompt(text), add_special_tokens=False))
