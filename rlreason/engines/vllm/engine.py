"""vLLM as the rollout engine, through its public calls only. Tested versions: docs/vllm.md.

It has its own copy of the weights, so every weight sync ends with a check that engine and trainer agree
(transfer.py). One thread owns vLLM: calls keep their order, and a call that hangs can be given up.
"""

import itertools
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch

from rlreason.config.groups import RolloutConfig
from rlreason.engines.base import Demand, Finished, Prompt, Sampling, Stops
from rlreason.engines.vllm.start import (
    STARTING,
    SingleThread,
    alone,
    environment,
    folder_for_files,
    generators_kept,
    hide_secrets,
    import_vllm,
    last_lines,
    llm_arguments,
    plan_memory,
    process_state_kept,
    remove_files,
    sampling_arguments,
    stderr_into,
    temporary_files_in,
    write_model,
)
from rlreason.engines.vllm.transfer import (
    PROBE,
    PROBE_PROMPT,
    PROBE_TOKENS,
    WeightCheck,
    WeightTransfer,
    largest_mismatch,
    mismatch_bound,
    probe_prompt,
)
from rlreason.errors import ConfigError, EngineError
from rlreason.model.policy import LogProbScorer, Policy
from rlreason.runtime import signals
from rlreason.runtime.files import alive
from rlreason.types import Response

T = TypeVar("T")


class EngineThread(SingleThread):
    """The thread that owns vLLM. After the first failure the engine counts as dead, and every later call says why."""

    def __init__(self, rollout: RolloutConfig, log: Path, check_alive: Callable[[], None]) -> None:
        super().__init__("vllm", check_alive)
        self.rollout, self.log = rollout, log
        self.failure: str | None = None

    def call(self, function: Callable[[], T], limit_s: float = math.inf) -> T:
        """Return `function()`; `EngineError` where it raises, or takes longer than `limit_s` or the timeout."""
        if self.failure is not None:
            raise EngineError(f"rollout=vllm: the engine is dead since: {self.failure}")
        timeout_s = self.rollout.timeout_s
        try:
            return self.run(function, min(timeout_s, limit_s))
        except TimeoutError as error:
            limit = f"{limit_s:g} s" if limit_s < timeout_s else f"rollout.timeout_s={timeout_s:g}"
            raise self.failed(f"no answer within {limit}: it hangs, or needs more") from error
        except Exception as error:
            raise self.failed(f"{type(error).__name__}: {error}") from error

    def failed(self, reason: str) -> EngineError:
        """Record the failure and return the error to raise."""
        self.failure = reason
        return EngineError(f"rollout=vllm failed: {reason}{last_lines(self.log)}")


CLOSING_S = 10.0  # for running calls to end when the engine stops


class VLLMEngine:
    """A vLLM engine that `transfer` starts and gives the policy's weights.

    Its length covers `demand` and the probe that checks its weights, its rows the largest request: vLLM allocates
    memory for all of them. With `rollout.sleep`, an engine on a GPU of the trainer's frees its memory after every
    `generate` and reloads the weights before the next. `started=False` leaves the start to `start`.
    """

    def __init__(
        self,
        policy: Policy,
        rollout: RolloutConfig,
        transfer: WeightTransfer,
        log: Path,
        demand: Demand,
        say: Callable[[str], None] = print,
        started: bool = True,
    ) -> None:
        self.policy, self.rollout, self.transfer, self.log, self.say = policy, rollout, transfer, log, say
        self.max_len = min(max(demand.longest, PROBE_PROMPT + PROBE_TOKENS), policy.max_context)
        self.max_rows = min(rollout.max_rows, demand.rows)
        self.sleeps, self.asleep = transfer.shares_gpu(policy) and rollout.sleep, False
        self.weight_version = self.drawn = 0
        self.each_step: Callable[[], None] = alive  # called after every decoding step; an exception ends `generate`
        self.arguments: dict[str, Any] = {}  # of vLLM's start, for provenance
        self._probe = probe_prompt(policy.padded_from or policy.head.shape[0], self.max_len)
        self._thread = EngineThread(rollout, log, self._check)
        self._files = ExitStack()
        self._starting = ExitStack()  # undoes the changes that a start makes to this process
        if started:
            self.start()

    def start(self) -> None:
        """Start vLLM and load the policy's weights; several engines may start at once, each in a thread."""
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        began = time.monotonic()
        with self._starting:
            self._starting.enter_context(STARTING)
            self._vllm = import_vllm(self.log, self.transfer.oldest_vllm, self.policy.compute_dtype == torch.float32)
            start = self._prepare_start()
            self.llm: Any = self._thread.call(start)
        self._sync_weights()
        self.say(f"vLLM is ready after {time.monotonic() - began:.0f} s")

    def _prepare_start(self) -> Callable[[], Any]:
        """Plan the memory and set up this process for vLLM; return the function that starts it, for its thread."""
        dtype, device = self.policy.compute_dtype, self.transfer.device(self.policy)
        memory = plan_memory(self.policy, device, self.max_len, self.max_rows, self.rollout.kv_cache_gb)
        self.say(f"starting vLLM {self._vllm.__version__} in {str(dtype).removeprefix('torch.')}: {memory} ...")
        arguments = llm_arguments(dtype, self.max_len, self.max_rows, memory, device, self.sleeps)
        self.arguments = arguments
        threads = torch.get_num_threads()

        def start() -> Any:
            torch.set_num_threads(threads)  # torch keeps it per thread
            with process_state_kept() if self.transfer.here else nullcontext():
                return self.transfer.start(self.policy, folder, arguments)

        # Created and removed here and not in vLLM's thread, which an interrupted start does not wait for. So are the
        # changes to the process: a start that hangs must not keep the terminal.
        files = self._files.enter_context(folder_for_files())
        folder = write_model(self.policy, Path(files) / "model")
        # Without OMP_NUM_THREADS vLLM turns torch down to one thread for good.
        seen = {"OMP_NUM_THREADS": str(threads)} | alone(os.environ) | self.transfer.environment()
        for change in (stderr_into(self.log), temporary_files_in(files), environment(seen)):
            self._starting.enter_context(change)
        self._starting.callback(self.transfer.settled)
        return start

    def _check(self) -> None:
        """Check the engine's process while waiting for vLLM's thread."""
        self.transfer.check_alive()
        if self.transfer.spawned():
            self._starting.close()

    def load_weights(self, policy: Policy) -> dict[str, float]:
        """Load these weights; return the sync's metrics, see `_sync_weights`.

        `EngineError` where vLLM fails, or its weights differ and `rollout.attest` is `stop`.
        """
        self.policy = policy
        self.weight_version += 1
        return self._sync_weights()

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, n: int = 1, finished: Finished | None = None
    ) -> list[Response]:
        """Sample n responses to each prompt; see `engines.base.Engine`.

        `ConfigError` where a prompt with a full response exceeds `demand`; `EngineError` where vLLM fails.
        """
        for prompt in prompts:
            if len(prompt.token_ids) + sampling.max_tokens > self.max_len:
                raise ConfigError(
                    f"sampling.max_tokens={sampling.max_tokens} and the prompt of {prompt.problem_id} "
                    f"({len(prompt.token_ids)} tokens) do not fit into the {self.max_len} tokens that the engine was "
                    "started for: lower sampling.max_tokens"
                )
        if self.asleep:
            self._sync_weights()
        responses = self._sample(prompts, sampling, n, finished)
        if self.sleeps:
            self._thread.call(lambda: self.llm.sleep(level=2))  # weights and cache go; neither is needed again
            self.asleep = True
        return responses

    def _sample(
        self, prompts: Sequence[Prompt], sampling: Sampling, n: int, finished: Finished | None = None
    ) -> list[Response]:
        engine = self.llm.llm_engine
        stops = Stops(self.policy.tokenizer, sampling.stop, sampling.min_tokens, sampling.tags)
        arguments = sampling_arguments(sampling, self.policy.end_ids | sampling.end_ids, stops.sees_special)
        arguments["output_kind"] = self._vllm.sampling_params.RequestOutputKind.FINAL_ONLY
        places, under_way = iter(range(len(prompts) * n)), set[str]()

        def step() -> Any:
            """Add requests and run one step. Requests wait here and not in vLLM, where each takes about 10 kB."""
            for place in itertools.islice(places, max(0, 2 * self.max_rows - len(under_way))):
                prompt = prompts[place // n]  # n requests, not one of n: each is returned as soon as it has ended
                params = arguments | {"seed": prompt.seed % 2**62 + place % n}
                ids = self._vllm.inputs.tokens_input(prompt.token_ids)
                engine.add_request(str(place), ids, self._vllm.SamplingParams(**params))
                under_way.add(str(place))
            self.drawn += min(len(under_way), self.max_rows)
            return engine.step()

        self.drawn = 0
        responses: dict[int, Response] = {}
        # Inside this process vLLM also draws from the global generators, without using the numbers.
        with generators_kept() if self.transfer.here else nullcontext():
            try:
                while len(responses) < len(prompts) * n:
                    outputs = self._thread.call(step)
                    self.each_step()
                    for output in outputs:
                        place = int(output.request_id)
                        under_way.discard(output.request_id)
                        responses[place] = self._response(prompts[place // n], output.outputs[0], stops)
                        if finished is not None:
                            finished(place, responses[place])
            finally:
                # Interrupted: the next call must not see these. After a signal there is no next call.
                if under_way and self._thread.failure is None and signals.stop_signal() is None:
                    self._thread.call(lambda: engine.abort_request(sorted(under_way)), CLOSING_S)
        return [responses[place] for place in range(len(prompts) * n)]

    def _response(self, prompt: Prompt, output: Any, stops: Stops) -> Response:
        token_ids, log_probs = list(output.token_ids), list(output.logprobs.logprobs)
        if output.finish_reason not in ("stop", "length") or len(log_probs) != len(token_ids):
            why = " (vLLM was asked to end)" if output.finish_reason == "abort" else ""  # its process got SIGTERM
            raise self._thread.failed(f"a sample ended with {output.finish_reason!r}{why}, {len(token_ids)} tokens")
        by_string = isinstance(output.stop_reason, str)  # a token id where a token ended it
        return Response(
            problem_id=prompt.problem_id,
            prompt_ids=prompt.token_ids,
            token_ids=token_ids,
            log_probs=log_probs,
            text=stops.text(token_ids, (stops.overhang(token_ids) or 0) if by_string else 0),
            finish_reason=output.finish_reason,
            weight_version=self.weight_version,
        )

    def _sync_weights(self) -> dict[str, float]:
        """Replace the weights in place, clear the prefix cache, and check the result.

        Return the sync's seconds and, unless `rollout.attest=off`, the check's train-inference mismatch (nats per
        token), number of compared tensors and seconds.
        """
        began = time.monotonic()
        self._thread.call(self._replace_weights)
        self.asleep = False
        metrics = {"time/weight_sync": time.monotonic() - began}
        if self.rollout.attest == "off":
            return metrics
        began = time.monotonic()
        check = self.verify_weights()
        if not check.holds:
            text = f"vLLM does not hold the trainer's weights after weight sync {self.weight_version}: {check}"
            if self.rollout.attest == "stop":
                raise EngineError(f"{text}; use rollout=hf, or rollout.attest=warn to go on all the same")
            self.say(f"! {text}")
        return metrics | {
            "rollout/weight_check_mismatch": check.mismatch,
            "rollout/weight_check_tensors": check.compared,
            "time/weight_check": time.monotonic() - began,
        }

    def _replace_weights(self) -> None:
        """Wake the engine, send the weights and empty the prefix cache of the old ones' keys; on vLLM's thread."""
        if self.policy.device.type == "cuda":  # vLLM and NCCL copy on streams that do not wait for the optimizer's
            torch.cuda.synchronize(self.policy.device)
        if self.asleep:
            torch.cuda.empty_cache()  # vLLM's own allocator cannot use what torch has cached
            self.llm.wake_up(tags=["weights"])
        self.transfer.send_weights(self.llm, self.policy)
        if self.asleep:
            self.llm.wake_up(tags=["kv_cache"])
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("the prefix cache could not be emptied: requests are still running")

    def verify_weights(self) -> WeightCheck:
        """Compare the weights of engine and trainer. The probe stays in the prefix cache, to reveal a stale one."""
        probe = self._sample([self._probe], PROBE, 1)[0]
        scorer = LogProbScorer(self.policy, self.max_len)
        trainer = scorer.log_probs([(probe.prompt_ids, probe.token_ids)])[0]
        compared, differing = self._thread.call(lambda: self.transfer.differing_tensors(self.llm, self.policy))
        mismatch = largest_mismatch(probe.log_probs, trainer)
        return WeightCheck(mismatch, mismatch_bound(self.policy.compute_dtype), compared, differing)

    def close(self) -> None:
        """Stop the engine and free its memory; a hung one in this process lives until the process ends."""
        llm, failed = self.__dict__.pop("llm", None), self._thread.failure is not None
        # Ends a call that still samples in another thread.
        self._thread.failure = self._thread.failure or "it was closed"

        def shut_down() -> None:
            if llm is None:
                return
            try:
                self._thread.run(lambda: self.transfer.shut_down(llm), min(self.rollout.timeout_s, CLOSING_S))
            except Exception as error:
                self.say(f"! vLLM did not shut down in good order: {type(error).__name__}: {error}")

        self.transfer.close(failed, shut_down)
        self._thread.stop()
        remove_files(self._files, self._thread)
        hide_secrets(self.log, self.say)
