"""Per-token log-probs and entropies of a model's next-token distribution, as both CS336 years define them."""

from typing import Any

from torch import Tensor

from rlreason.objectives.scoring import compute_entropy, gather_log_probs


def get_response_log_probs(
    model: Any, input_ids: Tensor, labels: Tensor, return_token_entropy: bool = False
) -> dict[str, Tensor]:
    """`log_probs` of the labels and, when asked, `token_entropy`; both (batch, seq) float32.

    The labels are shifted already. Prompt and padding positions are scored like any other; the caller masks.
    No attention mask is needed: padding is on the right, and earlier positions of a causal model do not attend to it.
    """
    logits = model(input_ids).logits
    scored = {"log_probs": gather_log_probs(logits, labels)}
    if return_token_entropy:
        scored["token_entropy"] = compute_entropy(logits)
    return scored
