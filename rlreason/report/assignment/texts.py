"""Questions that are answered in words."""

from rlreason.report.assignment.gathered import Gathered
from rlreason.report.assignment.metrics import cell, metric_sentences, values_of

LENGTH_NORMALIZATION = (
    "masked_mean divides the sum of a response's token losses by the number of its own tokens. For it: each response "
    "weighs the same however long it is, the size of the loss and of the gradient does not depend on length, and one "
    "learning rate fits while lengths change in training. Against it: a token of a long response gets less weight than "
    "one of a short response. Of two right responses the shorter is reinforced more for each token, which is harmless; "
    "but of two wrong ones the longer is punished less for each token, so that long wrong responses are the cheapest "
    "way to be wrong, and responses may grow without getting better. It is also no longer the policy gradient of the "
    "expected reward, whose sum over tokens has no such divisor.",
    "masked_normalize divides every response's sum by one constant, such as the longest response allowed. For it: "
    "every token has the same weight, whichever response it stands in, so that a long wrong response is punished in "
    "proportion to its length, and the gradient is the policy gradient's up to a constant. Against it: long responses "
    "dominate a batch, so the gradient is noisier and its norm follows the length; with a constant far above the usual "
    "length the steps are small, and the learning rate has to be chosen together with the constant; and a long right "
    "response with much idle text is reinforced as a whole.",
    "One may prefer the mean where lengths differ little, or where the size of a step should not move with them; and "
    "the constant where wrong responses ramble, or where length itself is watched. Clipping the gradient norm and "
    "Adam, which divides by the size of the gradient, hide much of the difference in scale: what is left is how "
    "tokens weigh within one batch.",
)
SWEEP, MEAN, CONSTANT = "grpo_length_normalization", "masked_mean", "constant"


def length_normalization(gathered: Gathered) -> list[str]:
    """Pros and cons, and what the runs found about the gradient norm."""
    read = gathered.sweep(SWEEP)
    if read is None:
        return [
            *LENGTH_NORMALIZATION,
            f"What the gradient norm does is measured by the sweep {SWEEP}, which has not run.",
        ]
    norms = [
        f"{cell(list(found.values())).partition(chr(10))[0]} with {one.label}"
        for one in read.study.settings
        if (found := values_of(one, "train/grad_norm"))
    ]
    measured = f"In the runs below the gradient norm ended at {' and at '.join(norms)}." if norms else ""
    return [*LENGTH_NORMALIZATION, " ".join([measured, *metric_sentences(read.study)]).strip()]


TEXTS = {"length_normalization": length_normalization}
