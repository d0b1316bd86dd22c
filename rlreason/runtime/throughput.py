"""How much work a phase of a run has done, in tokens and in FLOPs, and what share of the GPU's peak that is."""

from collections.abc import Iterable
from typing import NamedTuple

#: Dense bfloat16 matrix products with float32 sums, in TFLOP/s, by a part of the GPU's name; longer parts first.
#: From NVIDIA's data sheets of each product: half of what they print "with sparsity".
PEAK_TFLOPS = (
    ("H100 PCIe", 756.0), ("H100 NVL", 835.0), ("H100", 989.0), ("H200 NVL", 835.0), ("H200", 989.0),
    ("GH200", 989.0), ("B200", 2250.0), ("A100", 312.0), ("A800", 312.0), ("H800", 989.0), ("L40S", 362.0),
    ("A10G", 70.0), ("A10", 125.0), ("A30", 165.0), ("A40", 149.7), ("L4", 121.0), ("RTX 4090", 165.2),
    ("RTX 3090", 71.0), ("RTX A6000", 154.8),
)  # fmt: skip


def peak_tflops(gpu: str) -> float | None:
    """Dense bfloat16 TFLOP/s that a GPU of this name can do at most; None where they are not known.

    >>> peak_tflops("NVIDIA H100 80GB HBM3"), peak_tflops("NVIDIA A100-SXM4-40GB"), peak_tflops("Tesla T4")
    (989.0, 312.0, None)
    >>> peak_tflops("NVIDIA L40S"), peak_tflops("NVIDIA L40")
    (362.0, None)
    >>> peak_tflops("NVIDIA GeForce RTX 4090 Laptop GPU"), peak_tflops("NVIDIA H100 80GB HBM3 MIG 1g.10gb")
    (None, None)
    """
    words = gpu.replace("-", " ").split()
    if {"Laptop", "MIG", "D"} & set(words):  # another chip, or a part of one
        return None
    for part, peak in PEAK_TFLOPS:
        wanted = part.split()
        if any(words[at : at + len(wanted)] == wanted for at in range(len(words))):
            return peak
    return None


class ModelSize(NamedTuple):
    """What FLOPs are counted by, and by what their rate is divided."""

    parameters: int  # that multiply: an input embedding that is no output layer too only looks up
    layers: int
    width: int  # of all heads together
    peak_tflops: float | None = None  # of the device; None: not known
    ranks: int = 1  # devices that train, each with that peak


class Work(NamedTuple):
    """What was done in a phase. A backward pass costs twice its forward pass: training counts positions three times."""

    seconds: float = 0.0
    tokens: int = 0  # that the phase is there for: response tokens sampled, or tokens trained on
    positions: int = 0  # that went through the model: prompts too
    contexts: int = 0  # of each position, how many it attended to; their sum

    def plus(self, other: "Work") -> "Work":
        """Both together."""
        return Work(
            self.seconds + other.seconds,
            self.tokens + other.tokens,
            self.positions + other.positions,
            self.contexts + other.contexts,
        )

    def negative(self) -> "Work":
        """To take it off again with `plus`."""
        return Work(-self.seconds, -self.tokens, -self.positions, -self.contexts)


def group_work(prompt: int, responses: Iterable[int], passes: int = 1) -> Work:
    """The work of one prompt with its responses, from their lengths in tokens; the prompt counts once.

        positions   P + sum_i R_i
        contexts    P (P + 1) / 2 + sum_i (R_i P + R_i (R_i + 1) / 2)

    passes: 1 forward, 3 with the backward pass.

    >>> group_work(2, [1, 3])
    Work(seconds=0.0, tokens=4, positions=6, contexts=18)
    >>> group_work(2, [1, 3], passes=3).positions
    18
    """
    lengths = list(responses)
    contexts = prompt * (prompt + 1) // 2 + sum(n * prompt + n * (n + 1) // 2 for n in lengths)
    tokens = sum(lengths)
    return Work(0.0, tokens, passes * (prompt + tokens), passes * contexts)


def flops(work: Work, model: ModelSize) -> float:
    """FLOPs that the work takes: 2 N for each position, 4 L d for each pair of a position and one that it attends to.

    With the backward pass that is 6 N a token and 12 L d a pair. What a program computes twice (a prompt repeated,
    activations of a checkpointed layer) does not count.

    >>> flops(Work(positions=10, contexts=55), ModelSize(1000, layers=2, width=8))
    23520.0
    """
    return 2.0 * model.parameters * work.positions + 4.0 * model.layers * model.width * work.contexts


def rates(work: dict[str, Work], model: ModelSize | None) -> dict[str, float]:
    """`perf/PHASE_tokens_per_second` and, where the device's peak is known, `perf/PHASE_mfu`, a share of 1.

    >>> rates({"train": Work(2.0, 100, 300, 0)}, ModelSize(10**9, 1, 1, peak_tflops=1.0))
    {'perf/train_tokens_per_second': 50.0, 'perf/train_mfu': 0.3}
    """
    out = {}
    for phase, done in work.items():
        if done.seconds <= 0 or not done.tokens:
            continue
        out[f"perf/{phase}_tokens_per_second"] = done.tokens / done.seconds
        if model is not None and model.peak_tflops is not None:
            peak = 1e12 * model.peak_tflops * (model.ranks if phase == "train" else 1)
            out[f"perf/{phase}_mfu"] = flops(done, model) / done.seconds / peak
    return out
