"""From a problem to the token ids of its prompt."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlreason.errors import ConfigError
from rlreason.model.chat import Chat
from rlreason.model.policy import Policy
from rlreason.types import Problem


@dataclass(frozen=True, slots=True)
class PromptEncoder:
    """A problem -> the token ids of its prompt: the one that came with it word for word, or a filled template's."""

    policy: Policy
    fill: Callable[[str], str]  # a question -> the text of the prompt, or of the user's turn in a chat
    chat: Chat | None = None

    def check(self, problems: Sequence[Problem]) -> None:
        """`ConfigError` where a chat's user would write a token that shapes the chat, as one that ends the turn."""
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
        """Token ids, with what the tokenizer or the chat template puts around the text."""
        if problem.prompt is not None:
            return self.policy.encode_prompt(problem.prompt)
        text = self.fill(problem.question)
        if self.chat is None:
            return self.policy.encode_prompt(text)
        return self.policy.known(self.policy.tokenizer.encode(self.chat.prompt(text), add_special_tokens=False))
