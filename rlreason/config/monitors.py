"""The config group `monitors`: what a run watches itself for, and its reactions. A table: docs/monitors.md."""

from dataclasses import dataclass, fields

from rlreason.config.fields import choice

IN_A_FILE = "choose one (in a file, off stands in quotes)"
#: Rules that end a run under another name than their monitor's.
RULES = {"loss": "nan", "gradient": "nan", "metric": "nan", "optimizer": "nan", "truncated_evaluation": "truncated"}
WEIGHTS = "weights"  # the rule that cannot be switched off: nothing can be sampled from weights that are not finite


def _mode(default: str, *more: str) -> str:
    word: str = choice("off", "warn", "stop", *more, default=default, cure=IN_A_FILE)
    return word


@dataclass
class MonitorsConfig:
    """Each monitor is off, warns, or stops the run after the step; its thresholds begin with its name."""

    # Loss, gradient, weights, the optimizer's moments or another metric are not finite. Such weights end a run in any
    # case.
    nan: str = _mode("stop")
    skipped_update: str = _mode("warn")  # an update was left out, as its gradient was not finite
    gradient_norm: str = _mode("warn")  # the gradient norm of an update explodes, before it is clipped
    gradient_norm_factor: float = 20.0  # above this many times the median of the steps before
    gradient_norm_after: int = 10  # and after this many steps with a gradient
    kl: str = _mode("warn")  # the KL to the policy that sampled, or to the reference model, explodes
    kl_factor: float = 20.0  # above this many times the median of the steps before
    kl_above: float = 0.1  # and above this many nats per token
    kl_after: int = 10  # and after this many steps that measured it
    # The ratio to the policy that sampled is not 1 in the first update of a step, before anything was learned from it.
    first_ratio: str = _mode("warn")
    first_ratio_bound: float = 0.05  # of |mean ratio - 1| and of the approximate KL; float32 stays below 1e-5
    still_weights: str = _mode("warn")  # updates move hardly any weight that has a gradient
    still_weights_below: float = 0.2  # share of these weights that change, mean over the trained tensors
    still_weights_steps: int = 3  # in this many steps in a row
    entropy: str = _mode("warn")  # the policy's entropy collapses
    entropy_below: float = 0.005  # nats per token, mean over a step's responses
    no_live_group: str = _mode("warn")  # every group has equal rewards in all its responses; warns of every step
    no_live_group_steps: int = 10  # this many in a row stop the run
    zero_reward: str = _mode("warn")  # all rewards are 0
    zero_reward_steps: int = 10  # in this many steps in a row
    identical_samples: str = _mode("warn")  # all responses of every group are equal, or some against all odds
    truncated: str = _mode("warn")  # responses are cut at their limit, in steps or in evaluations
    truncated_above: float = 0.5  # share of the responses
    length: str = _mode("warn")  # the mean length of the responses explodes
    length_factor: float = 4.0  # above this many times the median of the last 30 steps
    length_after: int = 3  # and after this many steps
    round_trip: str = _mode("warn")  # texts change when they are turned into tokens and back
    round_trip_below: float = 0.5  # share of the prompts, or of the responses, that stay the same
    same_answer: str = _mode("warn")  # an evaluation's questions get one and the same answer
    # Share of the questions with the commonest answer, less its share of their ground truths.
    same_answer_above: float = 0.5
    # Rewards rise by something other than right answers: one answer to most questions, reward for responses without the
    # right answer, falling accuracy in evaluations, ever shorter responses that are no better.
    reward_hacking: str = _mode("warn")
    reward_hacking_after: int = 5  # this many of the last steps are compared with the first
    reward_hacking_gain: float = 0.1  # by which the mean reward must have risen
    accuracy: str = _mode("stop")  # two evaluations in a row have certainly lost four fifths of the accuracy before
    grader: str = _mode("warn")  # responses could not be graded
    # Engine and trainer give sampled tokens different probabilities. correct: warn, and let the objective's mismatch
    # weights correct for it.
    parity: str = _mode("warn", "correct")
    parity_bound: float = 0.05  # difference in nats per token, mean over a step; float32 stays below 1e-4
    # The engine's log-probabilities drift away from the trainer's, as they do when weights were not synced.
    engine_weights: str = _mode("warn")
    engine_weights_factor: float = 10.0  # above this many times their difference in the first step
    engine_weights_above: float = 2e-5  # and above this many nats per token
    # Of a sweep: a setting that another one certainly beats is stopped, with all its seeds.
    dominated: str = choice("off", "stop", default="off", cure=IN_A_FILE)


NAMES = tuple(f.name for f in fields(MonitorsConfig))
MODES = tuple(name for name in NAMES if not any(name.startswith(f"{other}_") for other in NAMES))  # no thresholds
OF_JOBS = ("truncated", "same_answer", "grader", "parity")  # also checked in runs without steps
OF_SWEEPS = ("dominated",)


def monitor_of(rule: str) -> str:
    """Return the monitor that a rule belongs to, as named in a status.

    >>> monitor_of("loss"), monitor_of("entropy")
    ('nan', 'entropy')
    """
    return RULES.get(rule, rule)


def limits_of(monitor: str) -> tuple[str, ...]:
    """Return the names of a monitor's thresholds.

    >>> limits_of("entropy"), limits_of("nan")
    (('entropy_below',), ())
    """
    return tuple(name for name in NAMES if name.startswith(f"{monitor}_"))


def settings_of(rule: str) -> tuple[str, ...]:
    """Return the settings that let a run ended by this rule resume; none for weights that are not finite.

    >>> settings_of("entropy"), settings_of("weights")
    (('monitors.entropy', 'monitors.entropy_below'), ())
    """
    monitor = monitor_of(rule)
    return tuple(f"monitors.{name}" for name in (monitor, *limits_of(monitor)) if name in NAMES)
