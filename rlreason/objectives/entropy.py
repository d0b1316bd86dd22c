"""The entropy bonus as a per-token term of the loss."""

import torch
from torch import Tensor


def entropy_bonus(token_entropy: Tensor, entropy_coef: float) -> Tensor:
    """-entropy_coef * H, a term of the per-token loss: a positive coefficient raises entropy. (batch, seq)

    An entropy that was computed without a gradient would change the reported loss and nothing else; that is
    an error here rather than a silent no-op.
    """
    if entropy_coef != 0 and torch.is_grad_enabled() and not token_entropy.requires_grad:
        raise ValueError(
            f"entropy_coef={entropy_coef}: the entropy has no gradient, so the bonus would do nothing; "
            "compute the entropy with gradients or set entropy_coef=0"
        )
    return -entropy_coef * token_entropy
