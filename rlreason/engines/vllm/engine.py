"""vLLM as the rollout engine, inside this process and through its public calls only. Tested versions: docs/vllm.md.
With a process of its own (vllm_process.py), other versions of _place, _make, _send and _differing are used.

It has a copy of the weights, so every hand-over ends with a look at whether engine and trainer agree (attest.py).
One thread owns vLLM: whoever calls, thread pools and order stay the same, and a call that hangs can be given up.
It must not know rewards, answers or steps.
"""

import itertools
import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from rlreason.engines.base import Finished, Prompt, Sampling
from rlreason.engines.stops import Stops
from rlreason.engines.vllm.single_thread import SingleThread
from rlreason.engines.vllm.startup import (
    engine_settings,
    files_into,
    generators_kept,
    import_vllm,
    last_lines,
    noise_into,
    place_for_files,
    plan_memory,
    process_state_kept,
    sampling_fields,
    write_model,
)
from rlreason.engines.weight_check import PROBE, WeightCheck, differing_tensors, gap_bound, largest_gap, probe_prompt
from rlreason.errors import ConfigError, EngineError
from rlreason.model.policy import Policy
from rlreason.model.scoring import LogProbScorer
from rlreason.types import Response

T = TypeVar("T")
CLOSING_S = 10.0  # for what is under way to end when the engine stops


class VLLMEngine:
    """vLLM beside the policy, on its GPU (`placement=shared`) or on the processor (`cpu`).

    With `sleep`, a GPU engine gives its memory back after every `generate` and is filled anew before the next.
    `sync_metrics` holds the newest hand-over's seconds and gap, as flat numbers.
    """

    oldest = (0, 26)

    def __init__(
        self,
        policy: Policy,
        log: Path,
        max_len: int,
        max_rows: int = 256,
        sleep: bool = False,
        kv_cache_gb: float | None = None,
        attest: str = "stop",  # stop | warn | off
        timeout_s: float = 600.0,  # for the start, one decoding step, one hand-over
        say: Callable[[str], None] = print,
    ) -> None:
        self.policy, self.max_len, self.max_rows = policy, min(max_len, policy.max_context), max_rows
        self.attest, self.timeout_s, self.log, self.say = attest, timeout_s, log, say
        self.sleeps, self.asleep = sleep and policy.device.type == "cuda", False
        self.weight_version = self.drawn = 0
        self.sync_metrics: dict[str, float] = {}
        self._probe = probe_prompt(policy.head.shape[0], self.max_len)
        self._failure: str | None = None
        self._owner = SingleThread("vllm")
        self._files = ExitStack()
        try:
            self._start(kv_cache_gb)
        except BaseException:
            self.close()
            raise

    def _start(self, kv_cache_gb: float | None) -> None:
        began = time.monotonic()
        vllm = self._vllm = import_vllm(self.log, self.oldest)
        dtype, place = self.policy.compute_dtype, self._place()
        memory = plan_memory(self.policy, dtype, place, self.max_len, self.max_rows, kv_cache_gb)
        self.say(f"starting vLLM {vllm.__version__} in {str(dtype).removeprefix('torch.')}: {memory} ...")
        settings = engine_settings(dtype, self.max_len, self.max_rows, memory, place, self.sleeps)
        threads = torch.get_num_threads()

        def make() -> Any:
            torch.set_num_threads(threads)  # a setting of each thread
            with process_state_kept(), files_into(place_of_files):
                return self._make(folder, settings)

        # Made and removed here and not in vLLM's thread, which nobody waits for when a start is interrupted.
        place_of_files = self._files.enter_context(place_for_files())
        folder = write_model(self.policy, Path(place_of_files) / "model")
        with noise_into(self.log):  # here and not in vLLM's thread: a start that hangs must not keep the terminal
            self.llm: Any = self._call(make)
        self._push()
        self.say(f"vLLM is ready after {time.monotonic() - began:.0f} s")

    def _place(self) -> torch.device:
        return self.policy.device

    def _make(self, folder: str, settings: dict[str, Any]) -> Any:
        return self._vllm.LLM(folder, **settings)

    def load_weights(self, policy: Policy) -> dict[str, float]:
        self.policy = policy
        self.weight_version += 1
        self._push()
        return self.sync_metrics

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, n: int = 1, finished: Finished | None = None
    ) -> list[Response]:
        for prompt in prompts:
            if len(prompt.token_ids) + sampling.max_tokens > self.max_len:
                raise ConfigError(
                    f"sampling.max_tokens={sampling.max_tokens} and the prompt of {prompt.problem_id} "
                    f"({len(prompt.token_ids)} tokens) do not fit into the {self.max_len} tokens that the engine was "
                    "started for: lower sampling.max_tokens"
                )
        if self.asleep:
            self._push()
        responses = self._sample(prompts, sampling, n, finished)
        if self.sleeps:
            self._call(lambda: self.llm.sleep(level=2))  # weights and cache go; neither is needed again
            self.asleep = True
        return responses

    def _sample(
        self, prompts: Sequence[Prompt], sampling: Sampling, n: int, finished: Finished | None = None
    ) -> list[Response]:
        engine, stops = self.llm.llm_engine, Stops(self.policy.tokenizer, sampling.stop, sampling.min_tokens)
        spelled = sampling_fields(sampling, self.policy.end_ids | sampling.end_ids, stops.sees_special)
        spelled["output_kind"] = self._vllm.sampling_params.RequestOutputKind.FINAL_ONLY
        places, under_way = iter(range(len(prompts) * n)), set[str]()

        def step() -> Any:
            """Requests wait here and not in the engine, where each takes about 10 kB."""
            for place in itertools.islice(places, max(0, 2 * self.max_rows - len(under_way))):
                prompt = prompts[place // n]  # n requests, not one of n: each is handed out as soon as it has ended
                params = spelled | {"seed": prompt.seed % 2**62 + place % n}
                ids = self._vllm.inputs.tokens_input(prompt.token_ids)
                engine.add_request(str(place), ids, self._vllm.SamplingParams(**params))
                under_way.add(str(place))
            self.drawn += min(len(under_way), self.max_rows)
            return engine.step()

        self.drawn = 0
        responses: dict[int, Response] = {}
        with generators_kept():  # vLLM draws from the global generators too, and throws that away
            try:
                while len(responses) < len(prompts) * n:
                    for output in self._call(step):
                        place = int(output.request_id)
                        under_way.discard(output.request_id)
                        responses[place] = self._response(prompts[place // n], output.outputs[0], stops)
                        if finished is not None:
                            finished(place, responses[place])
            finally:
                if under_way and self._failure is None:  # interrupted: the next call must not meet these
                    self._call(lambda: engine.abort_request(sorted(under_way)), CLOSING_S)
        return [responses[place] for place in range(len(prompts) * n)]

    def _response(self, prompt: Prompt, output: Any, stops: Stops) -> Response:
        token_ids, log_probs = list(output.token_ids), list(output.logprobs.logprobs)
        if output.finish_reason not in ("stop", "length") or len(log_probs) != len(token_ids):
            raise self._failed(f"a sample ended with {output.finish_reason!r}, {len(token_ids)} tokens")
        by_string = isinstance(output.stop_reason, str)  # a token's id where that ended it
        return Response(
            problem_id=prompt.problem_id,
            prompt_ids=prompt.token_ids,
            token_ids=token_ids,
            log_probs=log_probs,
            text=stops.text(token_ids, (stops.overhang(token_ids) or 0) if by_string else 0),
            finish_reason=output.finish_reason,
            weight_version=self.weight_version,
        )

    def _push(self) -> None:
        """Wake what sleeps, replace the weights in place, forget what was computed with the old ones, look."""
        began = time.monotonic()

        def replace() -> None:
            if self.asleep:
                torch.cuda.empty_cache()  # what training kept for itself; vLLM's own allocator cannot use it
                self.llm.wake_up(tags=["weights"])
            self._send()
            if self.asleep:
                self.llm.wake_up(tags=["kv_cache"])
            if not self.llm.reset_prefix_cache():
                raise RuntimeError("the prefix cache could not be emptied: requests are still running")

        self._call(replace)
        self.asleep = False
        self.sync_metrics = {"time/push": time.monotonic() - began}
        if self.attest != "off":
            found = self.look()
            if not found.holds:
                text = f"vLLM does not hold the trainer's weights after hand-over {self.weight_version}: {found}"
                if self.attest == "stop":
                    raise EngineError(f"{text}; use rollout=hf, or rollout.attest=warn to go on all the same")
                self.say(f"! {text}")

    def _send(self) -> None:
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": self.policy.named_weights()})
        self.llm.apply_model(repack_tied_head)

    def look(self) -> WeightCheck:
        """Compare engine and trainer as they are now. The probe stays in the prefix cache, to betray a stale one."""
        began = time.monotonic()
        probe = self._sample([self._probe], PROBE, 1)[0]
        scorer = LogProbScorer(self.policy, PROBE.temperature, self.max_len)
        trainer = scorer.log_probs([(probe.prompt_ids, probe.token_ids)])[0]
        compared, differing = self._call(self._differing)
        gap = largest_gap(probe.log_probs, trainer)
        self.sync_metrics |= {
            "rollout/attest_gap": gap,
            "rollout/attest_compared": compared,
            "time/attest": time.monotonic() - began,
        }
        return WeightCheck(gap, gap_bound(self.policy.compute_dtype), compared, differing)

    def _differing(self) -> tuple[int, tuple[str, ...]]:
        def compare(model: nn.Module) -> tuple[int, tuple[str, ...]]:
            return differing_tensors(model, self.policy.named_weights(), getattr(model, "packed_modules_mapping", {}))

        return tuple(self.llm.apply_model(compare)[0])

    def _call(self, function: Callable[[], T], limit_s: float = math.inf) -> T:
        """Run on vLLM's thread; whatever goes wrong there becomes one error, and the engine counts as dead."""
        if self._failure is not None:
            raise EngineError(f"rollout=vllm: the engine is dead since: {self._failure}")
        try:
            return self._owner.call(function, min(self.timeout_s, limit_s))
        except TimeoutError as error:
            reason = f"no answer within rollout.timeout_s={self.timeout_s:g}: it hangs, or needs more"
            if limit_s < self.timeout_s:
                reason = f"no answer within {limit_s:g} s"
            raise self._failed(reason) from error
        except Exception as error:
            raise self._failed(f"{type(error).__name__}: {error}") from error

    def _failed(self, reason: str) -> EngineError:
        self._failure = reason
        return EngineError(f"rollout=vllm failed: {reason}{last_lines(self.log)}")

    def close(self) -> None:
        """Stop the engine and give its memory back; a hung one is left to the end of the process."""
        llm = self.__dict__.pop("llm", None)
        self._failure = self._failure or "it was closed"  # whoever still samples in another thread ends here
        if llm is not None:
            try:
                self._owner.call(lambda: _shut_down(llm), min(self.timeout_s, CLOSING_S))
            except Exception as error:
                self.say(f"! vLLM did not shut down in good order: {type(error).__name__}: {error}")
        self._owner.stop()
        self._files.close()


def repack_tied_head(model: nn.Module) -> None:
    """On the processor, vLLM multiplies with a packed copy of a tied output head, which a reload does not renew."""
    head, embedding = getattr(model, "lm_head", None), getattr(getattr(model, "model", None), "embed_tokens", None)
    if head is not None and embedding is not None and head.weight is embedding.weight and not head.weight.is_cuda:
        head.quant_method.process_weights_after_loading(head)


def _shut_down(llm: Any) -> None:
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    llm.llm_engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()
