"""Monitors of the two sides that compute log-probabilities: the engine that samples, and the trainer that learns."""

from rlreason.monitors.seen import Found, Monitor, Seen, exploded

SAMPLED, EVALUATED = "rollout/mismatch_mean", "eval/mismatch_mean"


def _parity(seen: Seen) -> Found | None:
    """Engine and trainer must give sampled tokens the same probability, while they hold the same weights."""
    m, bound = seen.metrics, seen.limits["parity_bound"]
    mismatch = max(m.get(SAMPLED, 0.0), m.get(EVALUATED, 0.0))
    if mismatch <= bound or m.get("rollout/staleness", 0.0):
        return None
    corrected = "; mismatch weights correct for it" if seen.limits["parity"] == "correct" else ""
    text = (
        f"engine and trainer disagree by {mismatch:.3f} nats per token (monitors.parity_bound={bound:g}): weights, "
        f"temperature or precision differ{corrected}"
    )
    cure = "use rollout=hf, model.dtype=float32, or monitors.parity=correct with mismatch=truncate"
    return Found(text, cure, {"mismatch": mismatch})


def _engine_weights(seen: Seen) -> Found | None:
    """Rounding keeps the mismatch where it was in the first step; weights that were not handed over let it grow.

    It is compared with the first value of the run, which no update had come before, because it has no usual size:
    float32 has 1e-7 nats, bfloat16 1e-2.
    """
    above, factor = seen.limits["engine_weights_above"], seen.limits["engine_weights_factor"]
    for name in (SAMPLED, EVALUATED):
        before, now = seen.before(name), seen.metrics.get(name, 0.0)
        if not before or now <= above or seen.metrics.get("rollout/staleness", 0.0):
            continue
        if exploded(now, first := before[0], factor):
            text = (
                f"the engine's log-probabilities are {now:.2g} nats per token from the trainer's, and were "
                f"{first:.2g} in the first step: the engine samples from other weights than those that were trained"
            )
            cure = "sync the weights after every update; rollout=hf samples from the trainer's own weights"
            return Found(text, cure, {"mismatch": now, "first": first})
    return None


ENGINE = {
    "parity": Monitor(
        _parity,
        "Half precision on one side; another temperature; an engine with its own kernels or with old weights.",
        (SAMPLED,),
    ),
    "engine_weights": Monitor(
        _engine_weights,
        "A weight sync that was left out or that reached only some tensors; a cache of old keys and values.",
        (SAMPLED,),
    ),
}
