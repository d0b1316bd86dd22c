"""vLLM's process: it holds one `vllm.LLM` and answers the trainer's requests, which come through a pipe.

    python -m rlreason.engines.vllm_server DESCRIPTOR TRAINER

A request is (method of `Server`, arguments). The answer is ("done", result) or ("failed", error); while it samples,
("step", tokens drawn, what has ended) after every decoding step.

Both sides read the check, after every weight sync, that the engine has the trainer's weights. It has two parts:

1. Tensors: every weight that the engine keeps in the trainer's layout must equal the trainer's bit by bit after
   the cast, by digests of its rows. This finds a lost or stale tensor however little training changed it.
2. A probe: the engine continues a fixed prompt, and both sides compute the log-probabilities of those tokens. This
   finds what tensors do not show: a stale packed copy, a cache of old keys and values, another temperature.
"""

import os
import select
import shutil
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlreason.engines.base import Sampling

FILES = "rlreason-vllm-"  # prefix of the folder for the process's temporary files


PROBE_PROMPT = 160  # tokens: longer than any engine's prefix-cache block (16 to 128), so a stale cache would be used
PROBE_TOKENS = 8
PROBE = Sampling(max_tokens=PROBE_TOKENS)  # temperature 1, a scorer's default


@dataclass(frozen=True, slots=True)
class WeightCheck:
    """The result of one check. `mismatch` and `bound` are in nats per token."""

    mismatch: float  # |log p_engine - log p_trainer|, the largest over the probe's tokens
    bound: float
    compared: int  # tensors that could be compared
    differing: tuple[str, ...]  # names of those that differ from the trainer's

    @property
    def holds(self) -> bool:
        """Whether the engine has the trainer's weights. A mismatch of nan or a check without tensors does not hold."""
        return self.mismatch <= self.bound and self.compared > 0 and not self.differing


def mismatch_bound(dtype: torch.dtype) -> float:
    """The largest train-inference mismatch of a token that rounding alone explains, in nats.

    float32: 2e-5 is measured between kernels, 2e-4 at worst, and the bound is 1e-3. bfloat16 keeps 8 bits, so hidden
    states differ by some 2^-8 of themselves and logits of size 20 by tenths. Measured over twelve such probes: at most
    0.12 for a pretrained model, 0.36 for one with large random weights; the bound is 0.5.
    """
    return 1e-3 if dtype == torch.float32 else 0.5


def largest_mismatch(engine: Sequence[float], trainer: Sequence[float]) -> float:
    """Return max |a - b| over the probe's tokens; nan, which is within no bound, where a number is nan.

    >>> largest_mismatch([-1.0, -2.0], [-1.0, -2.5]), largest_mismatch([float("nan"), 0.0], [0.0, 1.0])
    (0.5, nan)
    """
    both = torch.tensor([engine, trainer], dtype=torch.float64)
    return float((both[0] - both[1]).abs().max())


#: The shape of a weight's rows, and their digests, which tell the weight from any other.
Digest = tuple[tuple[int, ...], list[int]]


def digest(weight: Tensor) -> Digest:
    """Digest a weight, so that it can be compared without sending it.

    Of each row: the sum over its indices j of bits_j * odd_j, modulo 2^64. An odd factor is invertible modulo 2^64, so
    one changed number always changes the digest; the factors differ, so exchanged numbers do too.

    >>> len(set(digest(torch.tensor([[1.0, 2.0], [2.0, 1.0], [1.0, 2.0]]))[1]))
    2
    """
    bits = weight.detach().contiguous().view({2: torch.int16, 4: torch.int32}[weight.dtype.itemsize])
    bits = bits.reshape(len(weight), -1)
    odd = torch.arange(bits.shape[1], device=bits.device) * -7046029254386353131 | 1  # int64 wraps around
    rows = torch.cat([(part.long() * odd).sum(1) for part in bits.split(1024)])  # a slice at a time: 8 bytes a number
    return tuple(weight.shape[1:]), rows.tolist()


def differing_tensors(
    engine: Mapping[str, Digest], trainer: Mapping[str, Digest], fused: Mapping[str, Sequence[str]]
) -> tuple[int, tuple[str, ...]]:
    """Compare the trainer's weights with the engine's: return how many could be compared, and the names that differ.

    `fused` maps the layers that the engine stacks from several of the trainer's along the first axis (qkv_proj of
    q_proj, k_proj, v_proj). Weights in a packed layout are left out: the probe covers them. Rows after the trainer's
    last one are the engine's padding.
    """
    whole_of = {part: whole for whole, parts in fused.items() for part in parts}
    left = dict(engine)  # rows that no tensor of the trainer's was compared with
    compared, differing = 0, []
    for name, (shape, rows) in trainer.items():
        *path, layer, kind = name.split(".")
        key = ".".join([*path, whole_of.get(layer, layer), kind])
        held_shape, held = left.get(key, ((), []))
        if held_shape != shape or len(held) < len(rows):
            continue
        left[key] = shape, held[len(rows) :]
        compared += 1
        if held[: len(rows)] != rows:
            differing.append(name)
    return compared, tuple(differing)


def repack_tied_head(model: nn.Module) -> None:
    """Renew the packed copy of a tied output head that vLLM uses on the processor; a reload leaves it stale."""
    head, embedding = getattr(model, "lm_head", None), getattr(getattr(model, "model", None), "embed_tokens", None)
    if head is not None and embedding is not None and head.weight is embedding.weight and not head.weight.is_cuda:
        head.quant_method.process_weights_after_loading(head)


class Server:
    """One vLLM engine inside this process."""

    def __init__(self, connection: "Connection[Any, Any]") -> None:
        self.connection = connection
        self.llm: Any = None  # a `vllm.LLM`

    def version(self) -> str:
        """Import vLLM and return its version."""
        import vllm

        return str(vllm.__version__)

    def start(self, folder: str, backend: str | None, arguments: dict[str, Any]) -> None:
        """Start vLLM for the model in `folder`; `backend`: vLLM's name of its own weight transfer."""
        from vllm import LLM
        from vllm.config import WeightTransferConfig

        if backend is not None:
            arguments["weight_transfer_config"] = WeightTransferConfig(backend=backend)
        self.llm = LLM(folder, **arguments)

    def sample(
        self, prompts: Sequence[tuple[int, list[int], int]], n: int, rows: int, arguments: dict[str, Any]
    ) -> None:
        """Sample n responses to each prompt, given by number, token ids and seed, `rows` at a time.

        Requests wait here and not in vLLM, where each takes about 10 kB. They are n and not one of n: each is
        returned as soon as it has ended, with its place, number x n + k.
        """
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        arguments["output_kind"] = RequestOutputKind.FINAL_ONLY
        engine, begun, done, wanted = self.llm.llm_engine, 0, 0, len(prompts) * n
        while done < wanted:
            while begun < min(wanted, done + 2 * rows):
                number, token_ids, seed = prompts[begun // n]
                of_request = SamplingParams(**arguments, seed=seed % 2**62 + begun % n)
                engine.add_request(str(number * n + begun % n), tokens_input(token_ids), of_request)
                begun += 1
            drawn, ended = min(begun - done, rows), []
            for output in engine.step():
                (one,) = output.outputs
                numbers = list(one.token_ids), list(one.logprobs.logprobs)
                # the first reason: stop, length, or what vLLM says where it fails
                ended.append((int(output.request_id), *numbers, one.finish_reason, one.stop_reason))
            done += len(ended)
            self.connection.send(("step", drawn, ended))

    def load_file(self, path: str) -> None:
        """Replace the weights by those in a file."""
        from safetensors.torch import load_file

        weights = load_file(path)
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights.items())})
        self.llm.apply_model(repack_tied_head)

    def ask(self, method: str, *arguments: Any) -> Any:
        """Call this method of `vllm.LLM`."""
        return getattr(self.llm, method)(*arguments)

    def digests(self) -> tuple[dict[str, Digest], dict[str, list[str]]]:
        """Return digests of every weight in the model's number format, and which layers are stacked of which."""
        dtype = self.llm.llm_engine.model_config.dtype
        (model,) = self.llm.apply_model(lambda model: model)
        held = {name: digest(p) for name, p in model.named_parameters() if p.dtype == dtype and p.numel()}
        return held, dict(getattr(model, "packed_modules_mapping", {}))


def end_with(trainer: int) -> None:
    """Wait until the trainer's process is gone, however it ended; then remove this process's files and end it."""
    with suppress(ProcessLookupError):
        select.select([os.pidfd_open(trainer)], [], [])
    if Path(tempfile.gettempdir()).name.startswith(FILES):
        shutil.rmtree(tempfile.gettempdir(), ignore_errors=True)
    os._exit(1)


def serve(server: Server) -> None:
    """Answer the trainer until it closes the pipe."""
    with suppress(EOFError, ConnectionError):
        while True:
            method, arguments = server.connection.recv()
            try:
                answer = ("done", getattr(server, method)(*arguments))
            except Exception as error:
                traceback.print_exc()  # into vllm.log
                answer = ("failed", f"{type(error).__name__}: {error}")
            server.connection.send(answer)


def main() -> None:
    """Serve the trainer whose pipe and process id the command line names."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they stop the trainer, which ends this process when it is ready
    threading.Thread(target=end_with, args=(int(sys.argv[2]),), daemon=True).start()
    serve(Server(Connection(int(sys.argv[1]))))


if __name__ == "__main__":
    from rlreason.engines import vllm_server  # under this name the trainer knows what it is sent

    vllm_server.main()
