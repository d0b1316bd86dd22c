"""vLLM as the rollout engine, through its public calls only. Tested versions: docs/vllm.md.

It runs in a process of its own, or in several of which each samples its share of the prompts. The random numbers of a
response come from its prompt's seed alone, so the tokens are those of one. Each has a copy of the weights, so every
weight sync ends with a check that engines and trainer agree (weight_check.py).
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from rlreason.config.groups import RolloutConfig
from rlreason.engines.base import Demand, Finished, Prompt, Sampling, Stops
from rlreason.engines.vllm.process import EngineProcess, Place, call_all, load_by_file, spoken
from rlreason.engines.vllm.server import STOP, Ended
from rlreason.engines.vllm.start import hide_secrets, llm_arguments, plan_memory, sampling_arguments, write_model
from rlreason.engines.vllm.weight_check import (
    PROBE,
    PROBE_PROMPT,
    PROBE_TOKENS,
    Digest,
    WeightCheck,
    differing_tensors,
    largest_mismatch,
    mismatch_bound,
    probe_prompt,
)
from rlreason.errors import ConfigError, EngineError
from rlreason.model.policy import LogProbScorer, Policy
from rlreason.records.files import ENGINE_LOGS
from rlreason.runtime import signals
from rlreason.types import Response

CLOSING_S = 10.0  # for a call that is broken off to end


class VLLMEngine:
    """vLLM at these places, started with the policy's weights; its logs are in `folder`.

    Its length covers `demand` and the probe that checks its weights, its rows the largest request: vLLM allocates
    memory for all of them. With `rollout.sleep`, an engine on a GPU of the trainer's frees its memory after every
    `generate` and gets the weights anew before the next.
    """

    def __init__(
        self,
        policy: Policy,
        rollout: RolloutConfig,
        places: Sequence[Place],
        folder: Path,
        demand: Demand,
        say: Callable[[str], None] = print,
    ) -> None:
        self.policy, self.rollout, self.say = policy, rollout, say
        self.max_len = min(max(demand.longest, PROBE_PROMPT + PROBE_TOKENS), policy.max_context)
        self.max_rows = min(rollout.max_rows, demand.rows)
        self.asleep = False
        self.weight_version = 0
        self._drawn: dict[EngineProcess, int] = {}
        self._probe = probe_prompt(policy.padded_from or policy.head.shape[0], self.max_len)
        self._lock = threading.Lock()  # one call at a time, from whichever thread
        self.processes: list[EngineProcess] = []
        try:
            self._start(places, folder)
        except BaseException:
            self.close()
            raise

    def _start(self, places: Sequence[Place], folder: Path) -> None:
        began, exact, arguments = time.monotonic(), self.policy.compute_dtype == torch.float32, list[dict[str, Any]]()
        for place, log in zip(places, ENGINE_LOGS, strict=False):
            title = f"vLLM on {place.name}: " if len(places) > 1 else ""
            self.processes.append(EngineProcess(place, folder / log, self.rollout.timeout_s, exact, title))
        for process in self.processes:  # each plans with the memory that is free before any of them takes some
            version, place = process.version(), process.place
            memory = plan_memory(self.policy, place.device, self.max_len, self.max_rows, self.rollout.kv_cache_gb)
            dtype = str(self.policy.compute_dtype).removeprefix("torch.")
            self.say(f"{process.title}starting vLLM {version} in {dtype}: {memory} ...")
            arguments.append(
                llm_arguments(dtype, self.max_len, self.max_rows, memory, place.device, self.sleeps(process))
            )
        for process, given in zip(self.processes, arguments, strict=True):
            process.start(write_model(self.policy, Path(process.files) / "model"), given)
        for process in self.processes:
            process.answer()
        self._sync_weights()
        self.say(f"vLLM is ready after {time.monotonic() - began:.0f} s")

    def sleeps(self, process: EngineProcess) -> bool:
        """Whether this engine frees its memory while the policy trains."""
        return process.place.shared and self.rollout.sleep

    @property
    def sleepers(self) -> list[EngineProcess]:
        """The engines that free their memory while the policy trains."""
        return list(filter(self.sleeps, self.processes))

    @property
    def drawn(self) -> int:
        """Tokens sampled since the last `generate` began."""
        return sum(self._drawn.values())

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of vLLM's start, for provenance; of several, by name."""
        if len(self.processes) == 1:
            return self.processes[0].arguments
        return {process.place.name: process.arguments for process in self.processes}

    def load_weights(self, policy: Policy) -> dict[str, float]:
        """Load these weights; return the sync's metrics, see `_sync_weights`.

        `EngineError` where vLLM fails, or its weights differ and `rollout.attest` is `stop`.
        """
        with self._lock:
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
        with self._lock:
            if self.asleep:
                self._sync_weights()
            shares = {process: range(k, len(prompts), len(self.processes)) for k, process in enumerate(self.processes)}
            responses = self._sample(prompts, shares, sampling, n, finished)
            if self.sleepers:
                call_all(self.sleepers, "sleep")
                self.asleep = True
        return [responses[place] for place in range(len(prompts) * n)]

    def _sample(
        self,
        prompts: Sequence[Prompt],
        shares: Mapping[EngineProcess, range],
        sampling: Sampling,
        n: int = 1,
        finished: Finished | None = None,
    ) -> dict[int, Response]:
        """Sample with each process its share of the prompts, given by their indices: neighbours are often alike."""
        stops = Stops(self.policy.tokenizer, sampling.stop, sampling.min_tokens, sampling.tags)
        arguments = sampling_arguments(sampling, self.policy.end_ids | sampling.end_ids, stops.sees_special)
        responses: dict[int, Response] = {}
        busy: list[EngineProcess] = []
        self._drawn = {}
        try:
            for process, share in shares.items():
                if share:
                    asked = [(prompts[i].token_ids, prompts[i].seed) for i in share]
                    process.send("sample", asked, n, self.max_rows, arguments)
                    busy.append(process)
            while busy:
                for process in spoken(busy, self.rollout.timeout_s):
                    message = process.message()
                    if message[0] == "done":
                        busy.remove(process)
                        continue
                    self._drawn[process] = message[1]
                    for ended in message[2]:
                        i = shares[process][ended.place // n]
                        place = i * n + ended.place % n
                        responses[place] = self._response(process, prompts[i], ended, stops)
                        if finished is not None:
                            finished(place, responses[place])
        finally:
            _stop(busy)
        return responses

    def _response(self, process: EngineProcess, prompt: Prompt, ended: Ended, stops: Stops) -> Response:
        token_ids, reason = ended.token_ids, ended.finish_reason
        if reason not in ("stop", "length") or len(ended.log_probs) != len(token_ids):
            raise process.failed(f"a sample ended with {reason!r}, {len(token_ids)} tokens")
        by_string = isinstance(ended.stop_reason, str)  # a token id where a token ended it
        return Response(
            problem_id=prompt.problem_id,
            prompt_ids=prompt.token_ids,
            token_ids=token_ids,
            log_probs=ended.log_probs,
            text=stops.text(token_ids, (stops.overhang(token_ids) or 0) if by_string else 0),
            finish_reason=reason,
            weight_version=self.weight_version,
        )

    def _sync_weights(self) -> dict[str, float]:
        """Replace the weights in place, empty the prefix caches, and check the result.

        Return the sync's seconds and, unless `rollout.attest=off`, the check's train-inference mismatch (nats per
        token, the largest of all engines), number of compared tensors and seconds.
        """
        began = time.monotonic()
        if self.policy.device.type == "cuda":  # vLLM and NCCL copy on streams that do not wait for the optimizer's
            torch.cuda.synchronize(self.policy.device)
        waking = self.sleepers if self.asleep else []
        if waking:
            torch.cuda.empty_cache()  # vLLM cannot use what torch has cached in this process
            call_all(waking, "wake_up", "weights")
        self.send_weights()
        call_all(waking, "wake_up", "kv_cache")
        self.asleep = False
        call_all(self.processes, "forget_prompts")
        metrics = {"time/weight_sync": time.monotonic() - began}
        if self.rollout.attest == "off":
            return metrics
        began = time.monotonic()
        checks = self.check_weights()
        for process, check in checks.items():
            if not check.holds:
                text = f"vLLM does not hold the trainer's weights after weight sync {self.weight_version}: {check}"
                if self.rollout.attest == "stop":
                    cure = "use rollout=hf, or rollout.attest=warn to go on all the same"
                    raise EngineError(f"{process.title}{text}; {cure}")
                self.say(f"! {process.title}{text}")
        return metrics | {
            "rollout/weight_check_mismatch": max(check.mismatch for check in checks.values()),
            "rollout/weight_check_tensors": sum(check.compared for check in checks.values()),
            "time/weight_check": time.monotonic() - began,
        }

    def send_weights(self) -> None:
        """Send the policy's weights to all engines, each on its way."""
        by_file = [process for process in self.processes if process.place.transfer == "file"]
        if by_file:
            load_by_file(by_file, self.policy)
        for process in self.processes:
            if process not in by_file:
                process.load(self.policy)

    def check_weights(self) -> dict[EngineProcess, WeightCheck]:
        """Compare each engine's weights with the trainer's. The probe stays in its prefix cache, to reveal a stale one.

        By digests of rows, so that no weights are sent.
        """
        dtype, scorer = self.policy.compute_dtype, LogProbScorer(self.policy, self.max_len)
        ours = {name: Digest.of(weight.detach().to(dtype)) for name, weight in self.policy.engine_weights()}
        checks = {}
        for process, (theirs, fused) in zip(self.processes, call_all(self.processes, "digests"), strict=True):
            probe = self._sample([self._probe], {process: range(1)}, PROBE)[0]
            trainer = scorer.log_probs([(probe.prompt_ids, probe.token_ids)])[0]
            mismatch = largest_mismatch(probe.log_probs, trainer)
            checks[process] = WeightCheck(mismatch, mismatch_bound(dtype), *differing_tensors(theirs, ours, fused))
        return checks

    def close(self) -> None:
        """End vLLM's processes, and a call that waits for them in another thread."""
        for process in self.processes:
            process.close()
            hide_secrets(process.log, self.say)


def _stop(busy: Sequence[EngineProcess]) -> None:
    """Break off what these still sample: the next call must not see it. After a signal there is no next call."""
    if signals.stop_signal() is not None:
        return
    under_way = [process for process in busy if process.failure is None]
    with suppress(EngineError):
        for process in under_way:
            process.send(STOP)
    for process in under_way:
        with suppress(EngineError):
            while process.message(CLOSING_S)[0] != "done":
                pass
