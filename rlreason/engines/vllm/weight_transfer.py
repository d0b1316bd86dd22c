"""How a vLLM engine gets the trainer's weights: the interface, and the way within one process. The other: process.py"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from rlreason.engines.weight_check import differing_tensors
from rlreason.model.policy import Policy


class WeightTransfer(ABC):
    """Where one vLLM engine runs, how weights reach it, how they are compared, and how it ends.

    `llm` is the engine, a `vllm.LLM`. All methods but `check_alive` and `close` are called on vLLM's thread.
    """

    oldest_vllm: tuple[int, int]  # the first version with what this way needs

    @abstractmethod
    def device(self, policy: Policy) -> torch.device:
        """Where vLLM computes."""

    @abstractmethod
    def start(self, policy: Policy, folder: str, arguments: dict[str, Any]) -> Any:
        """A `vllm.LLM` for the model in `folder`, ready to receive weights."""

    @abstractmethod
    def send_weights(self, llm: Any, policy: Policy) -> None:
        """Replace the engine's weights by the policy's."""

    @abstractmethod
    def differing_tensors(self, llm: Any, policy: Policy) -> tuple[int, tuple[str, ...]]:
        """How many tensors could be compared, and the names of those that are not the policy's."""

    def shares_gpu(self, policy: Policy) -> bool:
        """Whether vLLM takes memory from the policy's GPU, and so has reason to give it back."""
        return self.device(policy) == policy.device and policy.device.type == "cuda"

    @abstractmethod
    def check_alive(self) -> None:
        """Asked while an answer is awaited: `RuntimeError` where there will be none, because vLLM's process ended."""

    @abstractmethod
    def close(self, failed: bool, shut_down: Callable[[], None]) -> None:
        """End the engine; `shut_down` asks it to end. `failed`: it has died or hangs."""


class InProcessTransfer(WeightTransfer):
    """vLLM in the trainer's process and on the policy's device; weights are reloaded in place, without a copy."""

    oldest_vllm = (0, 26)

    def device(self, policy: Policy) -> torch.device:
        return policy.device

    def start(self, policy: Policy, folder: str, arguments: dict[str, Any]) -> Any:
        import vllm

        return vllm.LLM(folder, **arguments)

    def send_weights(self, llm: Any, policy: Policy) -> None:
        llm.collective_rpc("reload_weights", kwargs={"weights_iterator": policy.named_weights()})
        llm.apply_model(repack_tied_head)

    def differing_tensors(self, llm: Any, policy: Policy) -> tuple[int, tuple[str, ...]]:
        def compare(model: nn.Module) -> tuple[int, tuple[str, ...]]:
            return differing_tensors(model, policy.named_weights(), getattr(model, "packed_modules_mapping", {}))

        return tuple(llm.apply_model(compare)[0])

    def check_alive(self) -> None:
        """It lives as long as this process."""

    def close(self, failed: bool, shut_down: Callable[[], None]) -> None:
        shut_down()


def repack_tied_head(model: nn.Module) -> None:
    """On the processor, vLLM multiplies with a packed copy of a tied output head, which a reload leaves as it was."""
    head, embedding = getattr(model, "lm_head", None), getattr(getattr(model, "model", None), "embed_tokens", None)
    if head is not None and embedding is not None and head.weight is embedding.weight and not head.weight.is_cuda:
        head.quant_method.process_weights_after_loading(head)
