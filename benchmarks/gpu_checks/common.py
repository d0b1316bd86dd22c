"""What the checks share: what is asked of them, what they find, prompts, engines and memory in use."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rlreason.config.groups import RolloutConfig
from rlreason.engines.base import Demand, Engine, Prompt, Sampling, seed_for
from rlreason.engines.build import places_of
from rlreason.engines.vllm import VLLMEngine
from rlreason.model.policy import LogProbScorer, Policy
from rlreason.types import Grade, Response, Sample

TOKENS = 64  # of a sampled response


@dataclass(frozen=True, slots=True)
class Asked:
    """The model folder, a folder for what a check writes, and how thorough it is to be."""

    model: str
    folder: Path
    quick: bool = False

    def times(self, many: int) -> int:
        """So many, or a quarter of it."""
        return max(2, many // 4) if self.quick else many


@dataclass(frozen=True, slots=True)
class Found:
    """What a check came to. `passed` None: it was left out, or measures without judging."""

    passed: bool | None
    words: str
    figures: dict[str, Any] = field(default_factory=dict)


def used_gb() -> float:
    """GPU memory in use by all processes; without a GPU, this process's main memory."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return (total - free) / 2**30
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096 / 2**30


def synchronized() -> None:
    """Wait until the device has done all that was asked of it."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def prompts_for(policy: Policy, count: int = 32) -> list[Prompt]:
    """`count` different prompts with their seeds."""
    texts = [f"Question: What is {i} + {2 * i + 3}? Let us think step by step." for i in range(count)]
    return [Prompt(str(i), policy.encode_prompt(text), seed_for("gpu check", i)) for i, text in enumerate(texts)]


def make_vllm(policy: Policy, folder: Path, sleep: bool = False, placement: str = "auto") -> VLLMEngine:
    """A vLLM of 2 GB of cache, which stops the check where its weights are not the trainer's; its log in `folder`."""
    rollout = RolloutConfig("vllm", sleep=sleep, kv_cache_gb=2, placement=placement)
    places = places_of(rollout, policy.device.type, ranks=1)
    return VLLMEngine(policy, rollout, places, folder, Demand(min(512, policy.max_context), 128), say=print)


def mismatch(engine: Engine, policy: Policy, temperature: float, prompts: int = 32) -> float:
    """Mean |log p_engine - log p_trainer|, nats per sampled token."""
    responses = engine.generate(prompts_for(policy, prompts), Sampling(temperature, 0, TOKENS), 4)
    scores = LogProbScorer(policy, 8192, temperature).log_probs([(r.prompt_ids, r.token_ids) for r in responses])
    pairs = zip(responses, scores, strict=True)
    return statistics.fmean(abs(a - b) for r, score in pairs for a, b in zip(r.log_probs, score, strict=True))


def change_weights(policy: Policy) -> None:
    """A small change of every weight, in place of an optimizer step."""
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.0001)


def imitated(policy: Policy, count: int, prompt: int, response: int, group: int = 4) -> list[Sample]:
    """Samples to imitate, `group` to a prompt: random tokens, of whose texts nothing depends here."""
    draw, vocab = torch.Generator().manual_seed(0), policy.head.shape[0]

    def ids(size: int) -> list[int]:
        found: list[int] = torch.randint(vocab, (size,), generator=draw).tolist()
        return found

    prompts = [ids(prompt) for _ in range(math.ceil(count / group))]
    right = Grade(1.0, 1.0, 1.0, "correct")
    return [
        Sample(Response(f"p{i // group}", prompts[i // group], ids(response), [], "", "stop"), right, advantage=1.0)
        for i in range(count)
    ]


def gap(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> tuple[float, float]:
    """(mean, largest) difference of log-probabilities, in nats."""
    found = [abs(a - b) for one, other in zip(ours, theirs, strict=True) for a, b in zip(one, other, strict=True)]
    return statistics.fmean(found), max(found)
