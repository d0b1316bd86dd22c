"""The learning rate of every update, as one function of progress. It must not know optimizers or what a step is."""

import math


def learning_rate_at(done: float, width: float, total: float, peak: float, kind: str, warmup: float) -> float:
    """The rate of one update, from where it stands in the run. All lengths are in steps.

        done < warmup:   peak x min(1, (done + width) / warmup)
        constant:        peak
        linear:          peak x (total - done) / (total - warmup)
        cosine:          peak x (1 + cos(pi (done - warmup) / (total - warmup))) / 2

    done: steps finished before this update, a fraction when a step has several updates; width: this update's share
    of a step (1 / updates per step). No update is wasted: the first has a rate above 0, and so has the last. The
    decays are those of transformers' `get_scheduler`, whose warm-up lags one step behind: its first rate is 0.

    >>> [round(learning_rate_at(done, 1, 6, 1.0, "linear", 2), 3) for done in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    >>> [round(learning_rate_at(done / 2, 0.5, 2, 1.0, "cosine", 0), 3) for done in range(4)]
    [1.0, 0.854, 0.5, 0.146]
    """
    if done < warmup:
        return peak * min(1.0, (done + width) / warmup)
    if kind == "constant":
        return peak
    progress = min(1.0, (done - warmup) / (total - warmup)) if total > warmup else 1.0
    return peak * (1.0 - progress if kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress)))
