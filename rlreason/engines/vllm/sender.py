"""The trainer's side of vLLM's own weight transfer: what is sent, and the calls that steer the receiving workers.

Imports vLLM, so it is itself imported only once an engine in a process of its own is made.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from vllm.distributed.weight_transfer import ParamMeta, WeightSource

from rlreason.model.policy import Policy


class PolicyWeights(WeightSource):
    """The weights that `policy` has at the time of each pass, in the engine's number format and on the policy's device.

    Where several ranks train parts of a model, its whole weights lie in main memory.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def metadata(self) -> list[ParamMeta]:
        """Name, number format and shape of every weight, in the order of a pass."""
        return [ParamMeta(name, weight.dtype, tuple(weight.shape)) for name, weight in self]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        dtype, device = self.policy.compute_dtype, self.policy.device
        return ((name, weight.detach().to(dtype).to(device)) for name, weight in self.policy.engine_weights())


class Client:
    """vLLM's `VLLMWeightSyncClient` over a `vllm.LLM`: each call runs in every worker."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Let the workers make the receiving side."""
        self.llm.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": init_info})

    def start_weight_update(self) -> None:
        """Before the first weight."""
        self.llm.collective_rpc("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        """Receive weights as `update_info`, the transport's own record, says."""
        self.llm.collective_rpc("update_weights", kwargs={"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """After the last weight. vLLM's own version counter is not used: responses carry the engine's."""
        self.llm.collective_rpc("finish_weight_update")
