"""The trainer's side of vLLM's own weight transfer: the weights to send, and the calls to the receiving workers.

Imports vLLM, so it is imported only when an engine in a process of its own starts.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from vllm.distributed.weight_transfer import ParamMeta, WeightSource

from rlreason.model.policy import Policy


class PolicyWeights(WeightSource):
    """The policy's current weights at each pass, in the engine's number format and on the policy's device.

    Where several ranks train parts of a model, its whole weights are in main memory.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def metadata(self) -> list[ParamMeta]:
        """Return name, number format and shape of every weight, in the order of a pass."""
        return [ParamMeta(name, weight.dtype, tuple(weight.shape)) for name, weight in self]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        dtype, device = self.policy.compute_dtype, self.policy.device
        return ((name, weight.detach().to(dtype).to(device)) for name, weight in self.policy.engine_weights())


class WeightClient:
    """vLLM's `VLLMWeightSyncClient` over a `vllm.LLM`: each call runs in every worker."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Create the receiving side in the workers."""
        self.llm.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": init_info})

    def start_weight_update(self) -> None:
        """Announce the first weight."""
        self.llm.collective_rpc("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        """Receive weights as described by `update_info`, the transport's own record."""
        self.llm.collective_rpc("update_weights", kwargs={"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Announce the end. vLLM's own version counter is not used: responses carry the engine's."""
        self.llm.collective_rpc("finish_weight_update")
