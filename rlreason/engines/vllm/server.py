"""vLLM's process: it holds one `vllm.LLM` and answers the trainer's requests, which come through a pipe.

    python -m rlreason.engines.vllm.server DESCRIPTOR TRAINER

A request is (method of `Server`, arguments). The answer is ("done", result) or ("failed", error); while it samples,
("step", tokens drawn, what has ended) after every decoding step.
"""

import itertools
import os
import select
import shutil
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from rlreason.engines.vllm.weight_check import Digest, repack_tied_head

FILES = "rlreason-vllm-"  # prefix of the folder for the process's temporary files
STOP = "stop"  # the request that ends `sample` early; it has no answer of its own


class Ended(NamedTuple):
    """A response that has ended; `place`: its index among the request's."""

    place: int
    token_ids: list[int]
    log_probs: list[float]
    finish_reason: Any  # stop, length, or what vLLM says where it fails
    stop_reason: str | int | None


class Server:
    """One vLLM engine inside this process."""

    def __init__(self, connection: "Connection[Any, Any]") -> None:
        import vllm

        self.connection, self.version = connection, vllm.__version__
        self.llm: Any = None  # a `vllm.LLM`

    def start(self, folder: str, backend: str | None, arguments: dict[str, Any]) -> None:
        """Start vLLM for the model in `folder`; `backend`: vLLM's name of its own weight transfer."""
        import vllm
        from vllm.config import WeightTransferConfig

        if backend is not None:
            arguments = arguments | {"weight_transfer_config": WeightTransferConfig(backend=backend)}
        self.llm = vllm.LLM(folder, **arguments)

    def sample(self, prompts: Sequence[tuple[list[int], int]], n: int, rows: int, arguments: dict[str, Any]) -> None:
        """Sample n responses to each prompt, given by token ids and seed, `rows` at a time.

        Requests wait here and not in vLLM, where each takes about 10 kB. They are n and not one of n: each is
        returned as soon as it has ended.
        """
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        engine, drawn, left = self.llm.llm_engine, 0, len(prompts) * n
        places, under_way = iter(range(left)), set[str]()
        while left and not self.connection.poll():  # what comes is `STOP`
            for place in itertools.islice(places, max(0, 2 * rows - len(under_way))):
                token_ids, seed = prompts[place // n]
                of_request = arguments | {"output_kind": RequestOutputKind.FINAL_ONLY, "seed": seed % 2**62 + place % n}
                engine.add_request(str(place), tokens_input(token_ids), SamplingParams(**of_request))
                under_way.add(str(place))
            drawn += min(len(under_way), rows)
            outputs = engine.step()
            under_way -= {output.request_id for output in outputs}
            left -= len(outputs)
            self.connection.send(("step", drawn, [_ended(output) for output in outputs]))
        if under_way:
            engine.abort_request(sorted(under_way))

    def load_file(self, path: str) -> None:
        """Replace the weights by those in a file."""
        from safetensors.torch import load_file

        weights = load_file(path)
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights.items())})
        self.llm.apply_model(repack_tied_head)

    def transfer(self, method: str, arguments: dict[str, Any]) -> None:
        """Call a method of vLLM's own weight transfer, whose other side is in the trainer."""
        self.llm.collective_rpc(method, kwargs=arguments)

    def digests(self) -> tuple[dict[str, Digest], dict[str, list[str]]]:
        """Return digests of every weight in the model's number format, and which layers are stacked of which."""
        dtype = self.llm.llm_engine.model_config.dtype

        def of(model: Any) -> tuple[dict[str, Digest], dict[str, list[str]]]:
            kept = {name: p for name, p in model.named_parameters() if p.dtype == dtype and p.numel()}
            fused = dict(getattr(model, "packed_modules_mapping", {}))
            return {name: Digest.of(weight) for name, weight in kept.items()}, fused

        digests: tuple[dict[str, Digest], dict[str, list[str]]] = self.llm.apply_model(of)[0]
        return digests

    def forget_prompts(self) -> None:
        """Empty the prefix cache of the keys of older weights."""
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("the prefix cache could not be emptied: requests are still running")

    def sleep(self) -> None:
        """Free the memory of weights and cache; neither is needed again."""
        self.llm.sleep(level=2)

    def wake_up(self, tag: str) -> None:
        """Allocate the memory of "weights" or "kv_cache" again."""
        self.llm.wake_up(tags=[tag])


def _ended(output: Any) -> Ended:
    one = output.outputs[0]
    log_probs = list(one.logprobs.logprobs)
    return Ended(int(output.request_id), list(one.token_ids), log_probs, one.finish_reason, one.stop_reason)


def end_with(trainer: int) -> None:
    """End this process and remove its files when the trainer's process is gone, however it ended."""

    def watch() -> None:
        with suppress(ProcessLookupError):
            select.select([os.pidfd_open(trainer)], [], [])
        if Path(tempfile.gettempdir()).name.startswith(FILES):
            shutil.rmtree(tempfile.gettempdir(), ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def serve(connection: "Connection[Any, Any]") -> None:
    """Answer requests until the trainer closes the pipe; the first answer is vLLM's version."""
    method, arguments = "__init__", (connection,)
    server = Server.__new__(Server)
    while True:
        try:
            result = getattr(server, method)(*arguments)
            answer = ("done", server.version if method == "__init__" else result)
        except Exception as error:
            traceback.print_exc()  # into vllm.log
            answer = ("failed", f"{type(error).__name__}: {error}")
        connection.send(answer)
        method, arguments = connection.recv()
        while method == STOP:  # it came with the last decoding step
            method, arguments = connection.recv()


def main() -> None:
    """Serve the trainer whose pipe and process id the command line names."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they stop the trainer, which ends this process when it is ready
    end_with(int(sys.argv[2]))
    with suppress(EOFError, BrokenPipeError):
        serve(Connection(int(sys.argv[1])))


if __name__ == "__main__":
    from rlreason.engines.vllm import server  # under this name the trainer knows what it is sent

    server.main()
