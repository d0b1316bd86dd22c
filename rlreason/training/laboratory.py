"""Score objectives on one saved batch: loss, gradient, clipping, and the weight of each token."""

import json
import math
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor

from rlreason.config.algorithms import GRPOConfig
from rlreason.config.store import as_config, register
from rlreason.data.prepare import read_splits
from rlreason.engines.rollouts import token_ids
from rlreason.errors import ConfigError, DataError
from rlreason.model.parameters import choose_types, hardware_here
from rlreason.model.policy import Policy, load_policy
from rlreason.objectives.aggregation import AGGREGATIONS
from rlreason.objectives.objective import Objective
from rlreason.objectives.published import NAMED, OF_LOSSES, check_objective, with_axes_of
from rlreason.records.console import Console
from rlreason.records.files import CONFIG, finite
from rlreason.records.reader import RunFolder
from rlreason.records.rows import TO_LEARN, sample_of
from rlreason.records.training_curves import picture
from rlreason.runtime.files import write_whole
from rlreason.runtime.streams import Answer, folded
from rlreason.runtime.text import first_line, spans
from rlreason.training import algorithms as grpo
from rlreason.training.build import make_policy, make_scorer, set_threads, teach_habits
from rlreason.training.build_algorithm import make_learner
from rlreason.training.warm_start import StartWeights
from rlreason.types import Sample

OWN = "this run"


def variants(run: GRPOConfig) -> dict[str, GRPOConfig]:
    """Return name -> run: the run's own objective, every named one, those that a loss brings, other length norms.

    What a published objective does not set (eps, the constant, the estimator of KL) stays the run's.
    """
    named = NAMED | {f"loss={name}": objective for name, objective in OF_LOSSES.items()}
    others = [kind for kind in AGGREGATIONS if kind != run.length_norm.kind]
    norms = {f"length_norm={kind}": replace(run, length_norm=replace(run.length_norm, kind=kind)) for kind in others}
    allowed = {name: other for name, other in norms.items() if not check_objective(other)}
    return {OWN: run} | {name: with_axes_of(run, other) for name, other in named.items()} | allowed


def describe(o: Objective) -> str:
    """Describe the objective's axes in one line, extra terms only if there are some."""
    parts = [o.loss.loss_type, o.length_norm.kind, f"{o.baseline}/{o.std_norm}"]
    if o.kl_placement != "none":
        parts.append(f"kl in {o.kl_placement}")
    if o.entropy_coef:
        parts.append("entropy")
    if o.overlong != "none":
        parts.append(f"overlong={o.overlong}")
    if o.zero_variance == "skip":
        parts.append("skip")
    return ", ".join(parts)


def with_advantages(samples: Sequence[Sample], objective: Objective) -> list[Sample]:
    """Copy the samples with the objective's advantages; groups are formed by problem id.

    The copies keep reference log-probabilities only if the objective has a KL term.
    """
    has_kl = objective.kl_placement != "none"
    copies = [replace(s, reference_log_probs=s.reference_log_probs if has_kl else None) for s in samples]
    return grpo.with_advantages(copies, objective)[0]


LENGTH_BINS = 4


@dataclass(frozen=True, slots=True)
class LengthBin:
    """A quarter of the responses with an advantage, by length."""

    shortest: int
    longest: int
    weight: float  # of one of its tokens, per unit of advantage
    weight_share: float  # of all gradient weight


@dataclass(frozen=True, slots=True)
class ObjectiveScore:
    """One objective on one batch. A weight is |d loss / d log pi| of a token; None if nothing could be divided."""

    name: str
    axes: str
    loss: float
    grad_norm: float
    cosine: float | None  # with the run's own gradient
    clipped: float  # share of all response tokens
    zero_advantage: float  # share of samples
    without_loss: float  # share of samples that carry no loss (skipped groups, masked responses)
    position_weight: list[float | None]  # of one token at a position, per unit of advantage
    position_share: list[float]  # of all gradient weight
    by_length: list[LengthBin]

    @property
    def short_to_long(self) -> float | None:
        """Ratio of a token's weight in a short response to that in a long one."""
        if not self.by_length or not self.by_length[-1].weight:
            return None
        return self.by_length[0].weight / self.by_length[-1].weight


@dataclass(frozen=True, slots=True)
class Laboratory:
    """All objectives on one step of one run, the run's own first."""

    step: int
    samples: int
    tokens: int
    still_going: list[float]  # share of responses that have a token at each position
    objectives: list[ObjectiveScore]
    policy: str = "final"  # that scored the responses; "start" if the run saved no model


def laboratory(folder: RunFolder, run: GRPOConfig, step: int, samples: list[Sample], console: Console) -> Laboratory:
    """Score the samples under the run's final policy, or its start model, and compare the objectives."""
    if folder.model is not None:
        head = choose_types(run.model, run.rollout.engine, hardware_here())[1]
        policy = load_policy(str(folder.model), run.model.dtype, head_dtype=head)
    else:
        console.say(
            f"! {folder.path} saved no model (save_model={str(run.save_model).lower()}, {folder.status}): measured "
            "under the model that it started from, made again"
        )
        policy, start = start_policy(run, console)
        check_start(folder, start, console)
    size = policy.padded_from or policy.head.shape[0]
    ids = {i for s in samples for i in (*s.response.prompt_ids, *s.response.token_ids)}
    if wrong := sorted(i for i in ids if not 0 <= i < size):
        path = next(file.path for file in folder.rollouts() if file.step == step)
        raise DataError(
            f"{path} holds the token {wrong[-1]}, and the model's vocabulary has "
            f"{size}: give the run's own rollouts, or choose another --step"
        )
    set_threads(run, policy)
    if run.kl_placement != "none":
        samples, start = with_reference(run, samples, console)
        check_start(folder, start, console)
    result = compare(run, policy, step, samples, console)
    return replace(result, policy="final" if folder.model else "start")


def start_policy(run: GRPOConfig, console: Console) -> tuple[Policy, StartWeights | None]:
    """Return the run's start model: loaded, or found or made as the run did, with where it came from."""
    train = read_splits(run.data, console.say)[0] if run.model.made_on_the_spot else []
    policy = make_policy(run, train)
    return policy, teach_habits(run, policy, train, console)


def with_reference(
    run: GRPOConfig, samples: Sequence[Sample], console: Console
) -> tuple[list[Sample], StartWeights | None]:
    """Add log-probabilities under the run's start model, loaded or made again."""
    console.say("making the reference model of the KL term again ...")
    reference, start = start_policy(run, console)
    scores = make_scorer(run, run, reference).log_probs(token_ids(samples))
    return [replace(s, reference_log_probs=score) for s, score in zip(samples, scores, strict=True)], start


def check_start(folder: RunFolder, start: StartWeights | None, console: Console) -> None:
    """Warn if the built-in model's start, made again, is not the one in the run's summary."""
    recorded = (folder.summary or {}).get("start")
    if start and isinstance(recorded, dict) and recorded.get("weights") != start.weights:
        console.say(
            "! the start model made here is not the one of the run (made with another processor, torch or version "
            "of this code): this one is measured, and a KL term against it"
        )


def compare(run: GRPOConfig, policy: Policy, step: int, samples: list[Sample], console: Console) -> Laboratory:
    """Score each objective on the samples under the policy, the run's own first."""
    own: list[Tensor] = []
    scores = []
    for name, other in variants(run).items():
        console.progress(f"{name} ...")
        score, gradient = score_objective(name, other, policy, samples, own)
        scores.append(score)
        own = own or gradient
        del gradient  # as large as the model: free it before the next one
    lengths = torch.tensor([len(s.response.token_ids) for s in samples])
    going = [(lengths > t).double().mean().item() for t in range(int(lengths.max()))]
    return Laboratory(step, len(samples), int(lengths.sum()), going, scores)


def score_objective(
    name: str, run: GRPOConfig, policy: Policy, samples: Sequence[Sample], own: list[Tensor]
) -> tuple[ObjectiveScore, list[Tensor]]:
    """Return an objective's score and its gradient by parameter, compared with `own` (itself if empty)."""
    compared = with_advantages(samples, run)
    gradient = make_learner(run, policy).gradient(compared)
    n, n_tokens = len(compared), sum(len(s.response.token_ids) for s in compared)
    advantages = torch.tensor([s.advantage for s in compared], dtype=torch.float64)
    norm = math.sqrt(dot(gradient.parameters, gradient.parameters))
    by_position = position_weights(gradient.tokens, advantages)
    score = ObjectiveScore(
        name,
        describe(run),
        gradient.loss,
        norm,
        cosine(gradient.parameters, own or gradient.parameters),
        gradient.clipped / max(n_tokens, 1),
        (advantages == 0).double().mean().item(),
        sum(not s.has_loss for s in compared) / n,
        *by_position,
        length_weights(gradient.tokens, advantages),
    )
    return score, gradient.parameters


def dot(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """Return the inner product of two gradients, summed in double precision, parameter by parameter."""
    return sum((x.double() * y.double()).sum().item() for x, y in zip(a, b, strict=True))


def cosine(a: Sequence[Tensor], b: Sequence[Tensor]) -> float | None:
    """Return the cosine of the angle between two gradients; None if one of them is 0.

    >>> cosine([torch.tensor([3.0, 0.0]), torch.tensor([4.0])], [torch.tensor([3.0, 0.0]), torch.tensor([-4.0])])
    -0.28
    """
    lengths = math.sqrt(dot(a, a) * dot(b, b))
    return dot(a, b) / lengths if lengths else None


def position_weights(tokens: Sequence[Tensor], advantages: Tensor) -> tuple[list[float | None], list[float]]:
    """Return (weight per unit of advantage, share of all weight) at each token position.

        weight_t = sum_i |g_it| / sum_i |A_i|   over the responses i with A_i != 0 that have a token t
        share_t  = sum_i |g_it| / sum of all |g|

    tokens: g_it = d loss / d log pi of each response, (length_i,); advantages A (n,). Dividing by |A| leaves
    what the loss and its length norm do with a token, whatever the rewards were.

    >>> position_weights([torch.tensor([0.5, -0.5]), torch.tensor([1.0])], torch.tensor([-1.0, 1.0]))
    ([0.75, 0.5], [0.75, 0.25])
    """
    longest = max((len(g) for g in tokens), default=0)
    weight, compared_weight, size = torch.zeros(3, longest, dtype=torch.float64)
    for g, advantage in zip(tokens, advantages.abs(), strict=True):
        weight[: len(g)] += g.abs()
        if advantage > 0:
            compared_weight[: len(g)] += g.abs()
            size[: len(g)] += advantage
    total = weight.sum().item()
    pairs = zip(compared_weight.tolist(), size.tolist(), strict=True)
    return [w / a if a else None for w, a in pairs], [w / total if total else 0.0 for w in weight.tolist()]


def length_weights(tokens: Sequence[Tensor], advantages: Tensor, bins: int = LENGTH_BINS) -> list[LengthBin]:
    """Cut the responses with an advantage by length into `bins` of equal number, shortest first."""
    live = sorted((len(g), i) for i, g in enumerate(tokens) if advantages[i] != 0 and len(g))
    total = sum(g.abs().double().sum().item() for g in tokens)
    parts = torch.tensor_split(torch.tensor([i for _, i in live], dtype=torch.int64), min(bins, max(len(live), 1)))
    out = []
    for part in (p.tolist() for p in parts if len(p)):
        weight = sum(tokens[i].abs().double().sum().item() for i in part)
        size = sum(len(tokens[i]) * abs(advantages[i].item()) for i in part)
        lengths = [len(tokens[i]) for i in part]
        out.append(LengthBin(lengths[0], lengths[-1], weight / size, weight / total if total else 0.0))
    return out


def read_run(folder: RunFolder) -> GRPOConfig:
    """Read the settings of a GRPO run. `ConfigError` for another algorithm or settings of another version."""
    settings = folder.settings
    algorithm = settings.get("algorithm")
    if algorithm != "grpo":
        raise ConfigError(f"RUN={folder.path} is a run of algorithm={algorithm}: give one of algorithm=grpo")
    try:
        run = OmegaConf.to_object(as_config(settings))
    except OmegaConfBaseException as error:
        raise ConfigError(
            f"RUN={folder.path}: its {CONFIG} is not of this version ({first_line(error)}): repeat the run with this "
            "version"
        ) from error
    assert isinstance(run, GRPOConfig)
    return run


def read_step(folder: RunFolder, run: GRPOConfig, step: int | None = None) -> tuple[int, list[Sample]]:
    """Return the responses of a saved training step, by default of the last one, without advantages.

    Their old log-probabilities are those of the sampling policy, as the trainer scored it or, if it did not, as the
    engine reported it; so under the final policy the ratios differ from 1.
    """
    saved = {file.step: file for file in folder.rollouts() if file.step is not None}
    if not saved:
        raise ConfigError(
            f"RUN={folder.path} saved no rollouts (save_rollouts_every={run.save_rollouts_every}, n_steps={run.n_steps}"
            f", {folder.status}): repeat it with save_rollouts_every=1"
        )
    steps = sorted(saved)
    chosen = steps[-1] if step is None else step
    if chosen not in saved:
        raise ConfigError(f"--step {chosen} was not saved: choose one of {', '.join(spans(steps))}")
    samples = [sample_of(row) for row in folder.rows(saved[chosen], TO_LEARN).values()]
    if not samples:
        raise DataError(f"{saved[chosen].path} holds no responses: choose another --step")
    scores = [s.log_probs or s.response.log_probs for s in samples]
    return chosen, [replace(s, log_probs=lp, old_log_probs=lp) for s, lp in zip(samples, scores, strict=True)]


COLUMNS = (
    "objective",
    "loss",
    "|gradient|",
    "cosine",
    "clipped",
    "zero adv.",
    "short:long",
    "loss, length norm, advantage",
)
ROW = "{:<25} {:>9} {:>10} {:>7} {:>8} {:>9} {:>10}  {}"
LOOK_FOR = (
    "What to look for: cosine says whether an objective pushes the policy in the direction of this run's own (1: the "
    "same direction, where a larger |gradient| is no more than a larger step), and short:long says how many times more "
    "one token of the shortest quarter of responses weighs than one of the longest quarter: 1 where the length norm "
    "treats every token alike (constant, token) and nothing is clipped, above 1 where it divides by each response's "
    "own length (masked_mean)."
)
NO_GRADIENT = (
    "! this run's own gradient is 0 at this step, because no sample has an advantage: cosines are not defined here; "
    "choose another step (--step)"
)


def table(result: Laboratory) -> str:
    """Format one line per objective for a terminal, and what to look for."""
    head = (
        f"step {result.step}: {result.samples} responses, {result.tokens} tokens, scored by the {result.policy} policy"
    )
    head += " (so ratios are not 1, and clips act)"
    lines = ["\n" + head, "", ROW.format(*COLUMNS)]
    lines += [_line(m) for m in result.objectives]
    lines += ["", textwrap.fill(LOOK_FOR, 118)]
    if result.objectives[0].cosine is None:
        lines += [textwrap.fill(NO_GRADIENT, 118)]
    return "\n".join(lines)


def _line(m: ObjectiveScore) -> str:
    label = f"{OWN}, {m.name}" if m.name.startswith("length_norm=") else m.name
    label = label.replace("length_norm=", "but ")
    cosine = _number(m.cosine, ".3f")
    ratio = _number(m.short_to_long, ".2f")
    shares = f"{m.clipped:.1%}", f"{m.zero_advantage:.0%}"
    return ROW.format(label, f"{m.loss:.3g}", f"{m.grad_norm:.3g}", cosine, *shares, ratio, m.axes).rstrip()


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def lab_file(folder: Path, step: int, suffix: str) -> Path:
    """Return RUN/lab/step_NNNNN.SUFFIX, creating its folder."""
    path = folder / "lab" / f"step_{step:05d}.{suffix}"
    path.parent.mkdir(exist_ok=True)
    return path


def figures(result: Laboratory) -> dict[str, Any]:
    """Return all numbers of the table and the picture, and more; non-finite ones become null."""
    content = asdict(result)
    for score, row in zip(result.objectives, content["objectives"], strict=True):
        row["short_to_long"] = score.short_to_long
    numbers: dict[str, Any] = finite(content)
    return numbers


def draw(folder: Path, result: Laboratory) -> Path:
    """Plot, left, a token's weight by position for each length norm; right, the direction of each gradient."""
    path = lab_file(folder, result.step, "png")
    title = f"{folder.name}, step {result.step}; this run: {result.objectives[0].axes}"
    with picture(path, title, (12, 5), columns=2) as (left, right):
        _draw_positions(left, result)
        _draw_cosines(right, result)
    return path


def _draw_positions(ax: Any, result: Laboratory) -> None:
    """Plot a token's weight at each position, relative to the objective's average position."""
    norms = [m for m in result.objectives if m.name == OWN or m.name.startswith("length_norm=")]
    for m, style in zip(norms, ("-", "--", ":"), strict=False):
        points = [(t, w) for t, w in enumerate(m.position_weight) if w is not None]
        mean = sum(w for _, w in points) / len(points) if points else 0.0
        if mean:
            kind = m.axes.split(", ")[1]
            label = f"{kind} ({OWN})" if m.name == OWN else kind
            ax.plot([t for t, _ in points], [w / mean for _, w in points], style, linewidth=2, label=label)
    positions = range(len(result.still_going))
    ax.fill_between(positions, result.still_going, color="grey", alpha=0.15, label="share of responses this long")
    dips = "; it falls where tokens are clipped" if result.objectives[0].clipped else ""
    ax.set_title(f"weight of one token, by its position (1: the average{dips})", fontsize=10, loc="left")
    ax.set_xlabel("token position in the response", fontsize=9)
    ax.set_ylim(0, ax.get_ylim()[1] * 1.25)  # room for the legend above the curves
    ax.grid(alpha=0.25)
    ax.legend(fontsize=8, frameon=False, ncols=2, loc="upper right")


def _draw_cosines(ax: Any, result: Laboratory) -> None:
    named = [m for m in result.objectives[1:] if not m.name.startswith("length_norm=")]
    values = [m.cosine or 0.0 for m in named]
    ax.barh([m.name for m in named], values, color="tab:blue", alpha=0.75)
    for row, m in enumerate(named):
        text = f" {_number(m.cosine, '.2f')}" + (f", {m.clipped:.0%} clipped" if m.clipped >= 0.005 else "")
        ax.text(max(m.cosine or 0.0, 0.0), row, text, va="center", fontsize=8)
    ax.invert_yaxis()
    ax.axvline(0, color="black", linewidth=0.8)
    ax.set_xlim(min(0.0, *values) * 1.1 - 0.02, 1.3)
    ax.set_xticks([tick for tick in (-1, -0.75, -0.5, -0.25, 0, 0.25, 0.5, 0.75, 1) if tick >= min(0.0, *values)])
    ax.set_title("cosine of each objective's gradient with this run's own", fontsize=10, loc="left")
    ax.grid(alpha=0.25, axis="x")


def compare_gradients(folder: RunFolder, step: int | None, console: Console) -> Answer:
    """Compare the objectives on one step's rollouts, by default those of the last saved step."""
    register()
    run = read_run(folder)
    step, samples = read_step(folder, run, step)
    with console.wait("comparing the objectives"):
        result = laboratory(folder, run, step, samples, console)
    numbers = figures(result)
    file = lab_file(folder.path, result.step, "json")
    write_whole(file, json.dumps(numbers, indent=1) + "\n")
    with console.wait("drawing"):
        picture = draw(folder.path, result)
    files = folded(f"picture: {picture}, numbers: {file}", console.width)
    return Answer(f"{table(result)}\n\n{files}", {"run": folder.path, **numbers, "picture": picture, "numbers": file})
