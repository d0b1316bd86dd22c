"""The output head's memory for a moment, in bytes: logits of a chunk of positions, operands, and the weight's gradient.

Read from model/logprobs.py and model/products.py, and held against them on the processor by tests/test_memory_plan.py.
"""

from typing import NamedTuple

from rlreason.memory.shapes import ModelShape

CHUNK = 512  # positions whose logits exist at once: model/logprobs.py


class Head(NamedTuple):
    """How a run computes its output head. Sizes are bytes a number."""

    size: int = 4  # of what is multiplied to make logits (model.head)
    products: int = 4  # of what the two products of the backward pass multiply
    trained: bool = True  # its weights get a gradient
    entropy: bool = False  # the entropy gets one too
    on_gpu: bool = False

    @property
    def rounded(self) -> int:
        """Bytes of a number of the operands; off a GPU rounded ones lie in float32. 0: they need no copy."""
        return (2 if self.on_gpu else 4) if self.size == 2 else 0

    @property
    def kept(self) -> int:
        """Bytes that a number of its input takes until the backward pass."""
        return self.rounded or 4


def head_bytes(shape: ModelShape, scored: int, head: Head, with_gradient: bool = True) -> int:
    """The most that the head takes at one time for `scored` positions. n = min(512, scored).

        forward:  2 x 4 n V + r (V d + scored d)
        backward: 4 scored d + 4 V d + max(2 x 4 n V, made) + r V d + 2 (V d + scored d)
        made:     4 n V + 4 V d of float32 products;    6 n V + 2 V d + 4 V d of half-precision ones;
                  6 n V on a GPU, where products of half precision are added to the gradient in place

    The gradient of the weight is a sum over chunks: the sum and one chunk's, which is made when the logits are gone;
    the processor rounds it up before it adds. r: bytes of a rounded operand; the last term only where the backward
    pass rounds what the logits were not made of. `entropy`: 4 n V beside the first of the two. V d with a factor 4:
    only where the head is trained.
    """
    n, v, d = min(CHUNK, scored), shape.vocab, shape.width
    half = head.products == 2
    if not with_gradient:
        return 2 * 4 * n * v + head.rounded * (v * d + scored * d)
    trained = v * d if head.trained else 0
    of_logits = (12 if head.entropy else 8) * n * v
    if half and head.on_gpu:
        made = 6 * n * v
    elif half:
        same = head.size == 2  # its rounded numbers lie in float32, and so does what they make
        made = max(10 * n * v, 8 * n * v + 4 * trained) if same else 6 * n * v + 6 * trained
    else:
        made = 4 * n * v + 4 * trained
    operands = head.rounded * v * d + (2 * (v * d + scored * d) if half and head.size == 4 else 0)
    return 4 * scored * d + 4 * trained + operands + max(of_logits, made)
