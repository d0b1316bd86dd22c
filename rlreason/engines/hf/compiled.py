"""A decoding step by `torch.compile`: one program for every number of rows and columns, counted, and never required."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from rlreason.runtime.text import first_line

MOST = 5  # programs made after the first, in a run: more say that shapes are not followed


class CompiledStep:
    """The backbone's hidden states of one token per row, compiled; as it is where compiling fails.

    Rows and columns are symbols of the program, so that neither a compaction nor a new length makes another. A single
    row is a case of its own to the compiler.
    """

    def __init__(self, backbone: nn.Module, say: Callable[[str], None]) -> None:
        self.backbone, self.say = backbone, say
        self.programs = 0
        self._run: Callable[..., Any] = torch.compile(self._plain, backend=self._counted, dynamic=True)
        self._tried = False

    @property
    def recompilations(self) -> int:
        """Programs made after the first."""
        return max(0, self.programs - 1)

    def __call__(self, **inputs: Any) -> Tensor:
        """Hidden states (rows, 1, width) of what `Batch.step` hands to the backbone."""
        hidden: Tensor
        try:
            hidden = self._run(**inputs)
        except Exception as error:  # whatever the compiler raises; the step is repeated and writes the same columns
            if self._tried:
                raise
            self.say(f"! rollout.compile=true has no effect: this step cannot be compiled here ({first_line(error)})")
            self._run = self._plain
            hidden = self._run(**inputs)
        self._tried = True
        if self.recompilations > MOST and self._run != self._plain:
            self.say(f"! rollout.compile: {self.recompilations} recompilations are too many; sampling goes on without")
            self._run = self._plain
        return hidden

    def _plain(self, **inputs: Any) -> Tensor:
        hidden: Tensor = self.backbone(**inputs).last_hidden_state
        return hidden

    def _counted(self, graph: fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
        self.programs += 1
        compile_fx: Callable[..., Any] = torch._dynamo.lookup_backend("inductor")
        made: Callable[..., Any] = compile_fx(graph, examples)
        return made
