"""All monitors by the names of their settings.

To add one: a function and its entry in a module of this package, and a setting of its name in `config/monitors.py`.
"""

from rlreason.monitors.divergence import DIVERGENCE
from rlreason.monitors.engine import ENGINE
from rlreason.monitors.rewards import REWARDS
from rlreason.monitors.samples import SAMPLES
from rlreason.monitors.seen import Monitor

#: A warning of the grader comes in words of its own and is no function of metrics.
MONITORS: dict[str, Monitor] = DIVERGENCE | SAMPLES | REWARDS | ENGINE
#: Metrics whose values the monitors remember, step by step.
REMEMBERED = (
    "train/grad_norm", "train/weights_changed", "train/learning_rate", "train/kl_reference", "train/approx_kl",
    "reward/frac_reward_zero_std", "reward/mean", "reward/min", "reward/max", "reward/format",
    "rollout/right", "rollout/length", "rollout/length_correct", "rollout/mismatch_mean",
    "eval/mismatch_mean", "eval/accuracy_low", "eval/accuracy_high", "eval/accuracy",
)  # fmt: skip
