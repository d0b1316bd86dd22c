"""vLLM as the rollout engine, through its public calls only. Tested versions: docs/vllm.md.

It runs in a process of its own, or in several of which each samples its share of the prompts. The random numbers of a
response come from its prompt's seed alone, so the tokens are those of one. Each has a copy of the weights, so every
weight sync ends with a check that engines and trainer agree (vllm_server.py).
"""

import copy
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from packaging.specifiers import SpecifierSet

from rlreason.config.groups import INSTALL_VLLM as INSTALL
from rlreason.config.groups import RolloutConfig
from rlreason.engines.base import Demand, Finished, Prompt, Sampling, Stops
from rlreason.engines.vllm_process import EngineProcess, Place, call_all, load_by_file, spoken
from rlreason.engines.vllm_server import (
    PROBE,
    PROBE_PROMPT,
    PROBE_TOKENS,
    WeightCheck,
    differing_tensors,
    digest,
    largest_mismatch,
    mismatch_bound,
)
from rlreason.errors import ConfigError, EngineError
from rlreason.model.memory import kv_of_token, vllm_cache
from rlreason.model.parameters import model_size
from rlreason.model.policy import LogProbScorer, Policy
from rlreason.records.files import ENGINE_LOGS
from rlreason.types import Response

#: The arguments of vLLM that are the same for every run.
FIXED: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("vllm.yaml").read_text("utf-8"))
VERSIONS = ">=0.28,<0.33"  # the first with both sides of vLLM's weight transfer, and the newest tested one


class VLLMEngine:
    """vLLM at these places, started with the policy's weights; its logs are in `folder`.

    Its length covers `demand` and the probe that checks its weights, its rows the largest request: vLLM allocates
    memory for all of them. With `rollout.sleep`, an engine on a GPU of the trainer's frees its memory after every
    `generate` and gets the weights anew before the next. A call that fails or is broken off ends the engine.
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
        """Start the processes, as many as there are places."""
        self.policy, self.rollout, self.say = policy, rollout, say
        self.max_len = min(max(demand.longest, PROBE_PROMPT + PROBE_TOKENS), policy.max_context)
        self.max_rows = min(rollout.max_rows, demand.rows)
        self.asleep: list[EngineProcess] = []  # whose memory is free while the policy trains
        self.weight_version = self.drawn = 0
        # The same tokens for every weight sync, spread over the whole vocabulary.
        length, seeded = max(1, min(PROBE_PROMPT, self.max_len - PROBE_TOKENS)), torch.Generator().manual_seed(0)
        ids = torch.randint(policy.padded_from or len(policy.head), (length,), generator=seeded)
        self._probe = Prompt("probe", ids.tolist(), seed=0)
        self._lock = threading.Lock()  # one call at a time, from whichever thread
        self.processes: list[EngineProcess] = []
        try:
            exact = policy.compute_dtype == torch.float32
            for place, log in zip(places, ENGINE_LOGS, strict=False):
                self.processes.append(EngineProcess(place, folder / log, rollout.timeout_s, exact))
            try:
                version = call_all(self.processes, "version")[0]
            except EngineError as error:
                cure = f"{INSTALL}; or choose rollout=hf"
                raise ConfigError(f"rollout=vllm: vLLM cannot be imported: {cure}. {error}") from error
            if not SpecifierSet(VERSIONS).contains(version, prereleases=True):
                raise ConfigError(f"rollout=vllm: vLLM {version} is not among the tested {VERSIONS}: {INSTALL}")
            arguments: dict[str, dict[str, Any]] = {}
            sizes = self.max_len, self.max_rows, rollout.kv_cache_gb, demand.reserve
            for place in places:  # each plans with the memory that is free before any of them takes some
                given, words = llm_arguments(policy, place, *sizes)
                say(f"starting vLLM {version} on {place.name} in {given['dtype']}: {words} ...")
                arguments[place.name] = given
            for process in self.processes:
                model = write_model(policy, Path(process.files) / "model")
                process.send("start", model, process.place.transfer, arguments[process.place.name])
            for process in self.processes:
                process.message()
            self._sync_weights()
            #: Of vLLM's start, for provenance; of several engines, by name.
            self.arguments = arguments if len(places) > 1 else given

        except BaseException:
            self.close()
            raise

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
        longest = max((len(prompt.token_ids) for prompt in prompts), default=0)
        if longest + sampling.max_tokens > self.max_len:
            raise ConfigError(
                f"sampling.max_tokens={sampling.max_tokens} behind a prompt of {longest} tokens is over the "
                f"{self.max_len} tokens that the engine was started for: lower sampling.max_tokens"
            )
        with self._lock:
            if self.asleep:
                self._sync_weights()
            responses = self._sample(prompts, sampling, n, finished)
            self.asleep = [process for process in self.processes if process.place.sleeps]
            call_all(self.asleep, "ask", "sleep", 2)  # frees weights and cache: neither is needed again
        return responses

    def _sample(
        self, prompts: Sequence[Prompt], sampling: Sampling, n: int = 1, finished: Finished | None = None
    ) -> list[Response]:
        """Sample with each of k processes every k-th prompt: neighbours are often alike."""
        stops = Stops(self.policy.tokenizer, sampling)
        arguments = sampling_arguments(sampling, self.policy.end_ids | sampling.end_ids, stops.sees_special)
        responses, busy, self.drawn = dict[int, Response](), list[EngineProcess](), 0
        try:
            for first, process in enumerate(self.processes[: len(prompts)]):
                numbers = range(first, len(prompts), len(self.processes))
                asked = [(i, prompts[i].token_ids, prompts[i].seed) for i in numbers]
                process.send("sample", asked, n, self.max_rows, arguments)
                busy.append(process)
            while busy:
                for process in spoken(busy):
                    message = process.message()
                    if message[0] == "done":
                        busy.remove(process)
                        continue
                    self.drawn += message[1]
                    for place, token_ids, log_probs, reason, stop in message[2]:
                        if reason not in ("stop", "length") or len(log_probs) != len(token_ids):
                            raise process.failed(f"a sample ended with {reason!r}, {len(token_ids)} tokens")
                        # a token's id where no string ended it
                        overhang = stops.overhang(token_ids) if isinstance(stop, str) else 0
                        prompt = prompts[place // n]
                        responses[place] = Response(
                            problem_id=prompt.problem_id,
                            prompt_ids=prompt.token_ids,
                            token_ids=token_ids,
                            log_probs=log_probs,
                            text=stops.text(token_ids, overhang),
                            finish_reason=reason,
                            weight_version=self.weight_version,
                        )
                        if finished is not None:
                            finished(place, responses[place])
        except BaseException:  # the next call must not see what these still sample
            for process in busy:
                process.failure = process.failure or "its sampling was broken off"
            raise
        return [responses[place] for place in range(len(prompts) * n)]

    def _sync_weights(self) -> dict[str, float]:
        """Replace the weights in place, empty the prefix caches, and check the result.

        Return the sync's seconds and, unless `rollout.attest=off`, the check's train-inference mismatch (nats per
        token, the largest of all engines), number of compared tensors and seconds.
        """
        began = time.monotonic()
        if self.policy.device.type == "cuda":  # vLLM and NCCL copy on streams that do not wait for the optimizer's
            torch.cuda.synchronize(self.policy.device)
        if self.asleep:
            torch.cuda.empty_cache()  # vLLM cannot use what torch has cached in this process
        call_all(self.asleep, "ask", "wake_up", ["weights"])
        self.send_weights()
        call_all(self.asleep, "ask", "wake_up", ["kv_cache"])
        self.asleep = []
        if not all(call_all(self.processes, "ask", "reset_prefix_cache")):
            raise EngineError("vLLM's prefix cache could not be emptied of keys of the old weights")
        metrics = {"time/weight_sync": time.monotonic() - began}
        if self.rollout.attest == "off":
            return metrics
        began, checks = time.monotonic(), self.check_weights()
        for process, check in checks.items():
            if not check.holds:
                text = (
                    f"vLLM on {process.place.name} does not hold the trainer's weights after weight sync "
                    f"{self.weight_version}: the probe's log-probabilities differ by {check.mismatch:.3g} nats (bound "
                    f"{check.bound:g}), and {len(check.differing)} of {check.compared} compared tensors: "
                    f"{', '.join(check.differing[:3])}"
                )
                if self.rollout.attest == "stop":
                    raise EngineError(f"{text}; use rollout=hf, or rollout.attest=warn to go on all the same")
                self.say(f"! {text}")
        return metrics | {
            "rollout/weight_check_mismatch": max(check.mismatch for check in checks.values()),
            "rollout/weight_check_tensors": sum(check.compared for check in checks.values()),
            "time/weight_check": time.monotonic() - began,
        }

    def send_weights(self) -> None:
        """Send the policy's weights to all engines, each on its way."""
        if by_file := [process for process in self.processes if process.place.transfer is None]:
            load_by_file(by_file, self.policy)
        for process in self.processes:
            if process.place.transfer is not None:
                process.load(self.policy)

    def check_weights(self) -> dict[EngineProcess, WeightCheck]:
        """Compare each engine's weights with the trainer's. The probe stays in its prefix cache, to reveal a stale one.

        By digests of rows, so that no weights are sent.
        """
        policy, checks = self.policy, dict[EngineProcess, WeightCheck]()
        ours = {name: digest(weight) for name, weight in policy.engine_weights()}
        held = call_all(self.processes, "digests")
        probes = self._sample([self._probe] * len(self.processes), PROBE)  # one for each
        scorer, bound = LogProbScorer(policy, self.max_len), mismatch_bound(policy.compute_dtype)
        trainer = scorer.log_probs([(probe.prompt_ids, probe.token_ids) for probe in probes])
        for process, probe, scored, (theirs, fused) in zip(self.processes, probes, trainer, held, strict=True):
            mismatch = largest_mismatch(probe.log_probs, scored)
            checks[process] = WeightCheck(mismatch, bound, *differing_tensors(theirs, ours, fused))
        return checks

    def close(self) -> None:
        """End vLLM's processes, and a call that waits for them in another thread."""
        for process in self.processes:
            process.close()


def llm_arguments(
    policy: Policy, place: Place, max_len: int, max_rows: int, cache_gb: float | None, reserve: int = 0
) -> tuple[dict[str, Any], str]:
    """Return the arguments of `vllm.LLM` besides the model's folder, and the plan of its memory in words.

    The cache is planned by `model.memory.vllm_cache`, in the free memory of the GPU, or of the processor, less
    `reserve` bytes. `ConfigError` where `cache_gb` does not hold one sequence, or the plan does not fit.
    """
    dtype = policy.compute_dtype
    if place.gpu is not None:
        free, total = torch.cuda.mem_get_info(place.gpu)
    else:
        import psutil  # vLLM brings it

        free = total = int(psutil.virtual_memory().available)
    config = policy.model.config.get_text_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    token = kv_of_token(config.num_hidden_layers, kv_heads * head_dim, dtype.itemsize)
    weights = model_size(policy.model) * dtype.itemsize
    cache, one = vllm_cache(token, free - weights - reserve, max_len, max_rows, cache_gb)
    sizes = "{:.2g} GB of weights + {:.2g} GB of cache, {:.2g} GB free"
    plan = sizes.format(*(number / 2**30 for number in (weights, cache, free)))
    if cache < one or weights + cache > free:
        raise ConfigError(
            f"rollout=vllm needs {plan}, and one sequence of {max_len} tokens takes {one / 2**30:.3g} GB of cache: "
            "leave rollout.kv_cache_gb out, lower rollout.max_rows or sampling.max_tokens, or choose a smaller model"
        )
    arguments = FIXED["engine"] | {
        "dtype": str(dtype).removeprefix("torch."),
        "max_model_len": max_len,
        "max_num_seqs": max_rows,
        "kv_cache_memory_bytes": cache,
    }
    if place.gpu is None:
        return arguments | FIXED["processor"] | {"max_num_batched_tokens": max(4096, max_len)}, plan
    here = {"enable_sleep_mode": place.sleeps, "gpu_memory_utilization": 0.9 * free / total}
    return arguments | FIXED["gpu"] | here, plan


def sampling_arguments(sampling: Sampling, end_ids: Iterable[int], sees_special: bool) -> dict[str, Any]:
    """Return the arguments of `vllm.SamplingParams`: every one that affects the distribution or the end is set.

    `sees_special`: stop strings are searched in text with special tokens.
    """
    return FIXED["sampling"] | {
        "temperature": sampling.temperature,
        "max_tokens": sampling.max_tokens,
        "min_tokens": sampling.min_tokens,
        "stop": list(sampling.stop),
        "stop_token_ids": sorted(end_ids),
        "detokenize": bool(sampling.stop),
        "skip_special_tokens": not sees_special,
    }


def write_model(policy: Policy, folder: Path) -> str:
    """Write the model's config and tokenizer to a folder, without weights: the first weight sync brings them.

    There is no generation_config.json, so a model's own top-k or penalties do not affect sampling.
    """
    config = copy.deepcopy(policy.model.config)
    config.architectures = [type(policy.model).__name__]
    if policy.padded_from is not None:
        config.get_text_config().vocab_size = policy.padded_from  # as in `Policy.engine_weights`
    config.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    return str(folder)
