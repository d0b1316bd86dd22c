"""A short hash of a model's weights, by which results name the model that they were measured on."""

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

PER_TENSOR = 1024  # numbers that are hashed of each tensor


def weights_hash(weights: Iterable[tuple[str, Tensor]]) -> str:
    """8 hex digits from about a thousand numbers of every tensor, spread over it: a trained model differs everywhere.

    >>> one, two = [("w", torch.zeros(3))], [("w", torch.ones(3))]
    >>> weights_hash(one) == weights_hash(one), weights_hash(one) == weights_hash(two)
    (True, False)
    """
    digest = hashlib.sha256()
    for name, weight in weights:
        flat = weight.detach().reshape(-1)
        some = flat[:: max(1, len(flat) // PER_TENSOR)].to("cpu", torch.float32)
        digest.update(f"{name}{tuple(weight.shape)}".encode() + some.numpy().tobytes())
    return digest.hexdigest()[:8]
