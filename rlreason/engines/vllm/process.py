"""Run vLLM in a process of its own and send weights by vLLM's own weight transfer, through NCCL or main memory."""

import contextlib
import importlib
import multiprocessing
import os
import socket
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import ExitStack
from functools import partial
from multiprocessing.process import BaseProcess
from queue import Empty, SimpleQueue
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import torch

from rlreason.engines.base import Finished, Prompt, Sampling
from rlreason.engines.vllm.engine import CLOSING_S, VLLMEngine
from rlreason.engines.vllm.weight_transfer import TRAINER, WeightTransfer, WorkerExtension, row_digests
from rlreason.engines.weight_check import differing_tensors
from rlreason.errors import EngineError
from rlreason.model.policy import Policy
from rlreason.runtime.files import alive
from rlreason.types import Response


class ProcessTransfer(WeightTransfer):
    """Weight transfer to a vLLM in another process. Subclasses name the transport: vLLM's own, or a registered one.

    `gpu`: the number of its GPU among those that are visible here; None: the processor. `shared`: a rank of the trainer
    runs there too.
    """

    oldest_vllm = (0, 28)  # the first with the sending side of its weight transfer
    backend: str  # the transport's name in both of vLLM's factories
    #: A class of methods for vLLM's worker; importing its module, on both sides, registers the transport.
    worker_extension = f"{WorkerExtension.__module__}.{WorkerExtension.__qualname__}"

    def __init__(self, gpu: int | None = None, shared: bool = False) -> None:
        self.gpu, self.shared = gpu, shared
        self._before: frozenset[int | None] | None = None  # other engines' processes when this start began
        self.processes: list[BaseProcess] = []  # vLLM's own
        self._closed = False

    @abstractmethod
    def init_info(self) -> Any:
        """Return the sending side's arguments, a `TrainerInitInfo` of vLLM."""

    def device(self, policy: Policy) -> torch.device:
        return torch.device("cpu") if self.gpu is None else torch.device("cuda", self.gpu)

    def shares_gpu(self, policy: Policy) -> bool:
        return self.shared

    def environment(self) -> dict[str, str]:
        """Return environment variables of vLLM's process, which sees only its own GPU."""
        own = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
            TRAINER: str(os.getpid()),
        }
        if self.gpu is not None:
            own["CUDA_VISIBLE_DEVICES"] = visible_gpu(os.environ.get("CUDA_VISIBLE_DEVICES"), self.gpu)
        return own

    def start(self, policy: Policy, folder: str, arguments: dict[str, Any]) -> Any:
        import vllm
        import vllm.envs
        from vllm.config import WeightTransferConfig
        from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

        from rlreason.engines.vllm.weight_transfer import PolicyWeights, WeightClient

        importlib.import_module(self.worker_extension.rpartition(".")[0])
        self._before = frozenset(process.pid for process in engine_processes())
        # vLLM caches the environment when an engine starts in this process.
        getattr(vllm.envs, "disable_envs_cache", lambda: None)()
        llm = vllm.LLM(
            folder,
            weight_transfer_config=WeightTransferConfig(backend=self.backend),
            worker_extension_cls=self.worker_extension,
            **arguments,
        )
        if not self.spawned():
            raise RuntimeError("vLLM started no process of its own")
        self._weights = PolicyWeights(policy)
        self._sender = WeightTransferTrainerFactory.trainer_init(
            self.init_info(), client=WeightClient(llm), source=self._weights
        )
        return llm

    def spawned(self) -> bool:
        """Find this engine's processes: while `STARTING` is held, every new one is its own."""
        if not self.processes and self._before is not None:
            self.processes = [p for p in engine_processes() if p.pid not in self._before]
        return bool(self.processes)

    def settled(self) -> None:
        self.spawned()
        self._before = None  # later processes belong to other engines

    def send_weights(self, llm: Any, policy: Policy) -> None:
        self._weights.policy = policy
        self._sender.send_weights()

    def differing_tensors(self, llm: Any, policy: Policy) -> tuple[int, tuple[str, ...]]:
        """Compare the tensors by digests of their rows, so that no weights are sent."""
        digests, fused = llm.collective_rpc("row_digests")[0]
        theirs = {name: torch.from_numpy(np.frombuffer(rows, np.int64).copy()) for name, rows in digests.items()}
        model: Any = SimpleNamespace(named_parameters=theirs.items)
        self._weights.policy = policy
        ours = ((name, row_digests(weight)) for name, weight in self._weights)
        return differing_tensors(model, ours, fused)

    def check_alive(self) -> None:
        for process in () if self._closed else self.processes:
            if not process.is_alive():
                raise RuntimeError(f"vLLM's process has ended (exit code {process.exitcode})")

    def shut_down(self, llm: Any) -> None:
        llm.llm_engine.engine_core.shutdown()

    def close(self, failed: bool, shut_down: Callable[[], None]) -> None:
        """Shut vLLM down and kill its process; one that died or hangs is killed without the shutdown."""
        self._closed = True  # from now on it may end
        self.spawned()
        if not failed:
            shut_down()
        for process in self.processes:
            process.kill()
            process.join(10)


class NCCLTransfer(ProcessTransfer):
    """Transfer to another GPU of this machine; NCCL does not connect two processes on one GPU."""

    backend = "nccl"

    def __init__(self, gpu: int = 1, shared: bool = False) -> None:
        super().__init__(gpu, shared)

    def init_info(self) -> Any:
        """Return NCCL's arguments: the trainer is rank 0 of two and opens a port on this machine."""
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        return NCCLTrainerInitInfo(master_address="127.0.0.1", master_port=free_port(), world_size=2, rank=0)


class HostTransfer(ProcessTransfer):
    """Transfer through a file in main memory to any device, the policy's own GPU and the processor included."""

    backend = "host_memory"
    worker_extension = "rlreason.engines.vllm.engine.HostWorker"

    def init_info(self) -> Any:
        from rlreason.engines.vllm.engine import HostInit

        return HostInit(rank=0)


def engine_processes() -> list[BaseProcess]:
    """Return vLLM's child processes of this one, by name, since vLLM has no list of them."""
    return [process for process in multiprocessing.active_children() if process.name.startswith("EngineCore")]


_ports: list[int] = []  # already given to an engine


def free_port() -> int:
    """Return a free port of this machine, a different one for each engine, since several start at once.

    >>> free_port() != free_port()
    True
    """
    with ExitStack() as probes:
        while True:
            probe = probes.enter_context(socket.socket())
            probe.bind(("127.0.0.1", 0))
            if (port := int(probe.getsockname()[1])) not in _ports:
                _ports.append(port)
                return port


def visible_gpu(visible: str | None, number: int) -> str:
    """Return CUDA_VISIBLE_DEVICES for a process with this one of the GPUs that are `visible` here.

    >>> visible_gpu(None, 1), visible_gpu("2, 5", 1), visible_gpu("GPU-8f2a,GPU-5e1c,MIG-3b", 2)
    ('1', '5', 'MIG-3b')
    """
    return visible.split(",")[number].strip() if visible else str(number)


T = TypeVar("T")
EngineOutput = tuple[int, int | None, Any]  # (engine, index of a response among its own, the response); None: ended


class StoppedError(Exception):
    """Raised to stop the sampling of an engine when another has failed, or the caller was interrupted."""


class ManyEngines:
    """Start these engines side by side and use them as one; `names`: where each runs, for messages.

    All responses to a prompt come from one engine, which reads the prompt once.
    """

    def __init__(self, engines: Sequence[VLLMEngine], names: Sequence[str]) -> None:
        self.engines, self.names = list(engines), list(names)
        self._stopped = threading.Event()
        for engine in self.engines:
            engine.each_step = self._go_on
        try:
            self._on_all(lambda engine: engine.start())
        except BaseException:
            self.close()
            raise

    @property
    def weight_version(self) -> int:
        """As in `engines.base.Engine`; the same for all engines."""
        return self.engines[0].weight_version

    @weight_version.setter
    def weight_version(self, version: int) -> None:
        for engine in self.engines:
            engine.weight_version = version

    @property
    def drawn(self) -> int:
        """Tokens sampled by all engines since the last `generate` began."""
        return sum(engine.drawn for engine in self.engines)

    @property
    def arguments(self) -> dict[str, dict[str, Any]]:
        """The arguments of each engine's start, for provenance."""
        return {name: engine.arguments for name, engine in zip(self.names, self.engines, strict=True)}

    def load_weights(self, policy: Policy) -> dict[str, float]:
        """Load these weights into every engine and check each; return the metrics of `merge_syncs`.

        `EngineError` names the engine that fails or does not have the weights.
        """
        return merge_syncs(self._on_all(lambda engine: engine.load_weights(policy)))

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, n: int = 1, finished: Finished | None = None
    ) -> list[Response]:
        """Sample n responses to each prompt; see `engines.base.Engine`. `finished` is called in the caller's thread.

        `EngineError` names the engine that fails; the others stop.
        """
        shares = deal(len(prompts), len(self.engines))
        events: SimpleQueue[EngineOutput] = SimpleQueue()

        def sample(k: int) -> None:
            ended: BaseException | None = None
            try:
                mine = [prompts[i] for i in shares[k]]
                self.engines[k].generate(mine, sampling, n, lambda place, response: events.put((k, place, response)))
            except BaseException as error:
                ended = error
            events.put((k, None, ended))

        under_way = {k for k, share in enumerate(shares) if share}
        for k, engine in enumerate(self.engines):
            engine.drawn = 0
            if k in under_way:
                threading.Thread(target=sample, args=(k,), name=f"sampling {self.names[k]}", daemon=True).start()
        responses: dict[int, Response] = {}
        try:
            while under_way:
                k, place, what = events.get()
                if place is None:
                    under_way.discard(k)
                    if what is not None:
                        raise self._named(k, what)
                    continue
                whole = shares[k][place // n] * n + place % n
                responses[whole] = what
                if finished is not None:
                    finished(whole, what)
        except BaseException:
            self._stopped.set()
            if _all_ended(events, under_way):
                self._stopped.clear()
            raise
        return [responses[place] for place in range(len(prompts) * n)]

    def close(self) -> None:
        """Close all side by side, also where one fails to close."""
        self._stopped.set()
        futures = [in_thread(engine.close, f"closing {name}") for engine, name in self._pairs()]
        wait(futures)
        for future in futures:
            future.result()

    def _pairs(self) -> list[tuple[VLLMEngine, str]]:
        return list(zip(self.engines, self.names, strict=True))

    def _on_all(self, call: Callable[[VLLMEngine], T]) -> list[T]:
        """Run `call` on each engine, in a thread each, and return the results.

        After a failure the others get no more time than closing may take.
        """
        futures = [in_thread(partial(call, engine), f"vLLM, {name}") for engine, name in self._pairs()]
        if wait(futures, return_when=FIRST_EXCEPTION).not_done:
            wait(futures, CLOSING_S)
        for k, future in enumerate(futures):
            if future.done() and (error := future.exception()) is not None:
                raise self._named(k, error)
        return [future.result() for future in futures]

    def _named(self, k: int, error: BaseException) -> BaseException:
        """Return an engine's failure with the name of the engine; a `ConfigError` unchanged."""
        if type(error) is not EngineError:
            return error
        named = EngineError(f"vLLM on {self.names[k]}: {error}")
        named.__cause__ = error
        return named

    def _go_on(self) -> None:
        alive()
        if self._stopped.is_set():
            raise StoppedError


def deal(prompts: int, engines: int) -> list[range]:
    """Deal the prompts' indices to the engines in turn, since neighbours often have similar lengths.

    >>> [list(share) for share in deal(5, 3)]
    [[0, 3], [1, 4], [2]]
    """
    return [range(k, prompts, engines) for k in range(engines)]


def merge_syncs(syncs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Merge the metrics of one weight sync by several engines: the largest mismatch, the longest time, all tensors.

    >>> one = {"time/weight_sync": 1.0, "rollout/weight_check_mismatch": 1e-6, "rollout/weight_check_tensors": 20}
    >>> merge_syncs([one, one | {"time/weight_sync": 2.0}])["time/weight_sync"]
    2.0
    >>> merge_syncs([one, one])["rollout/weight_check_tensors"]
    40
    """
    return {
        name: sum(s[name] for s in syncs) if name.endswith("_tensors") else max(s[name] for s in syncs)
        for name in syncs[0]
    }


def in_thread(call: Callable[[], T], name: str) -> "Future[T]":
    """Run `call` in a daemon thread; return the future of its result."""
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, name=name, daemon=True).start()
    return future


def _all_ended(events: "SimpleQueue[EngineOutput]", under_way: set[int]) -> bool:
    """Wait for engines to stop sampling, at most as long as closing may take; return whether all have."""
    deadline = time.monotonic() + CLOSING_S
    while under_way and (left := deadline - time.monotonic()) > 0:
        with contextlib.suppress(Empty):
            k, place, _ = events.get(timeout=left)
            if place is None:
                under_way.discard(k)
    return not under_way
