"""The random generators of the whole process: Python's, numpy's and torch's. A run of its own draws from none of them.

Its sampling and its order of problems have seeds of their own; what a user's loss or data draw comes from here.
"""

import random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

NAME = "generator."  # of a tensor that is a state


def seed_generators(seed: int) -> None:
    """Begin as in every other run of this seed."""
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_states() -> "tuple[dict[str, Any], dict[str, Tensor]]":
    """The states of all of them: Python's and numpy's in plain values, torch's as tensors by name."""
    import numpy as np
    import torch

    kind, keys, *rest = np.random.get_state(legacy=True)
    plain = {"python": random.getstate(), "numpy": [kind, np.asarray(keys).tolist(), *rest]}
    tensors = {f"{NAME}cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        tensors |= {f"{NAME}cuda.{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    return plain, tensors


def set_random_states(plain: dict[str, Any], tensors: "dict[str, Tensor]") -> None:
    """Put every generator back; those of GPUs as far as there are as many."""
    import numpy as np
    import torch

    version, keys, gauss = plain["python"]
    random.setstate((version, tuple(keys), gauss))
    kind, words, *rest = plain["numpy"]
    np.random.set_state((kind, np.array(words, np.uint32), *rest))
    torch.set_rng_state(tensors[f"{NAME}cpu"])
    for i in range(torch.cuda.device_count()):
        if (state := tensors.get(f"{NAME}cuda.{i}")) is not None:
            torch.cuda.set_rng_state(state, i)
