"""What each of several ranks that train holds of a whole model's parts: all of them, or a share (FSDP2).

Arithmetic, read from rlreason/distributed and from torch's FSDP2: nobody has measured it on GPUs.
"""

from rlreason.memory import formula as f
from rlreason.memory.work import Work

BUCKET = 256 << 20  # bytes of gradients that are summed in one call: distributed/ranks.py
NCCL = 300 << 20  # bytes of its buffers: a guess
AT_ONCE = 2  # layers whose weights are whole: the one that computes, and the next one


def on_ranks(
    work: Work, held: dict[str, int], training: dict[str, int], spread: bool
) -> tuple[dict[str, int], dict[str, int]]:
    """(what a rank holds always, what a step takes on top at its peak), of the same of one process.

    whole:  all of it, and one bucket of gradients, or the largest tensor's, where they are summed, at the end
    spread: held / ranks and gradients / ranks, each weight whole while it computes:
            4 (root + 2 layer), and in the backward pass a layer's whole gradient twice, 8 layer, or the root's, 8 root

    root: numbers of embedding, output head and last norm, which are in no layer; layer: of one layer.
    """
    if work.ranks == 1:
        return held, training
    if not spread:
        largest = max((4 * numbers for numbers, _ in work.trained), default=0)
        return held, training | {"sum over ranks": max(BUCKET, largest) + (NCCL if work.head.on_gpu else 0)}
    root, layer = root_and_layer(work)
    divided = {name: -(-amount // work.ranks) for name, amount in held.items()}
    passes = {name: amount for name, amount in training.items() if name != "gradients"}
    gradients = {"gradients": -(-f.gradient_bytes(work.trained) // work.ranks)} if work.trained else {}
    of_backward = max(8 * layer, 8 * root - sum(passes.values())) if work.trained else 0
    gathered = 4 * (root + AT_ONCE * layer) + of_backward + (NCCL if work.head.on_gpu else 0)
    return divided, gradients | passes | {"gathered weights": gathered}


def root_and_layer(work: Work) -> tuple[int, int]:
    """Numbers of what is in no layer, and of one layer."""
    s = work.shape
    root = s.width * (s.vocab * (1 if s.tied else 2) + 1)
    return root, (s.numbers - root) // s.layers


def of_start(work: Work) -> int:
    """Bytes beside its share of the weights that a rank takes while it gets them: the root, and its largest tensor."""
    root, _ = root_and_layer(work)
    return 4 * (root + work.shape.width * work.shape.vocab) + (NCCL if work.head.on_gpu else 0)
