"""The work of training updates, and the size and device that it is measured by."""

from collections.abc import Sequence

import torch

from rlreason.model.policy import Policy
from rlreason.runtime.clock import Clock
from rlreason.runtime.throughput import ModelSize, Work, group_work, peak_tflops
from rlreason.types import Sample

FORWARD, WITH_BACKWARD = 1, 3  # passes


class TrainingWork:
    """Counts updates as they are taken, each with the seconds of training since the one before."""

    def __init__(self, clock: Clock, all_learn: bool) -> None:
        """`all_learn`: a KL or entropy term gives samples with advantage 0 a gradient too."""
        self.clock, self.all_learn, self.spent = clock, all_learn, clock.spent("train")

    def took(self, batch: Sequence[Sample]) -> None:
        """An update on these samples is over."""
        before, self.spent = self.spent, self.clock.spent("train")
        self.clock.worked("train", training_work(batch, self.spent - before, self.all_learn))


def training_work(batch: Sequence[Sample], seconds: float, all_learn: bool = False) -> Work:
    """What an update on these samples takes, each prompt once a group; `tokens` are the response tokens with loss.

    A sample with advantage 0 goes forward only, unless `all_learn`: a KL or entropy term gives it a gradient.
    """
    groups: dict[tuple[int, ...], dict[int, list[int]]] = {}
    for s in batch:
        if s.has_loss:
            passes = WITH_BACKWARD if s.advantage or all_learn else FORWARD
            by_passes = groups.setdefault(tuple(s.response.prompt_ids), {})
            by_passes.setdefault(passes, []).append(len(s.response.token_ids))
    work = Work(seconds)
    for prompt, by_passes in groups.items():
        for passes, lengths in by_passes.items():
            work = work.plus(group_work(len(prompt), lengths, passes))
    return work


def measure_by(clock: Clock, policy: Policy, ranks: int) -> None:
    """Let the clock count the FLOPs of this model, and the memory of its GPU where it is on one; `ranks` train it."""
    config, device = policy.model.config, torch.device(policy.device)
    on_gpu = device.type == "cuda"
    peak = peak_tflops(torch.cuda.get_device_name(device)) if on_gpu else None
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    looked_up = 0 if config.tie_word_embeddings else policy.model.get_input_embeddings().weight.numel()
    parameters = sum(p.numel() for p in policy.model.parameters()) - looked_up
    clock.model = ModelSize(parameters, config.num_hidden_layers, heads * width, peak, ranks)
    if on_gpu:

        def gauge() -> float:
            found = float(torch.cuda.max_memory_allocated(device))
            torch.cuda.reset_peak_memory_stats(device)
            return found

        clock.gauge = gauge
