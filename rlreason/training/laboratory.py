"""Compare objectives on one saved batch: loss, gradient, clipping, and the weight of a token by length."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor

from rlreason.config.algorithms import GRPOConfig
from rlreason.config.store import as_config, register
from rlreason.data.prepare import read_splits
from rlreason.engines.rollouts import token_ids
from rlreason.errors import ConfigError
from rlreason.model.parameters import choose_types, freeze, hardware_here
from rlreason.model.policy import Policy, load_policy
from rlreason.objectives.aggregation import AGGREGATIONS
from rlreason.objectives.published import NAMED, OF_LOSSES, check_objective, with_axes_of
from rlreason.records.console import Console
from rlreason.records.files import write_json
from rlreason.records.reader import RunFolder
from rlreason.records.rows import TO_LEARN, sample_of
from rlreason.runtime.streams import Answer
from rlreason.training.algorithms import with_advantages
from rlreason.training.build import make_learner, make_policy, make_scorer, set_threads
from rlreason.training.warm_start import teach_habits
from rlreason.types import Sample

OWN = "this run"
Score = dict[str, Any]


def variants(run: GRPOConfig) -> dict[str, GRPOConfig]:
    """Return name -> run: the run's own objective, every named one, those that a loss brings, other length norms.

    What a published objective does not set (eps, the constant, the estimator of KL) stays the run's.
    """
    named = NAMED | {f"loss={name}": objective for name, objective in OF_LOSSES.items()}
    variants = {OWN: run} | {name: with_axes_of(run, other) for name, other in named.items()}
    for kind in AGGREGATIONS:
        other = replace(run, length_norm=replace(run.length_norm, kind=kind))
        if kind != run.length_norm.kind and not check_objective(other):
            variants[f"length_norm={kind}"] = other
    return variants


def compare(run: GRPOConfig, policy: Policy, samples: Sequence[Sample], console: Console) -> list[Score]:
    """Score each objective on the samples under the policy, the run's own first.

    cosine: of the angle to the run's own gradient, None if one of them is 0; clipped: share of all response tokens;
    zero_advantage: share of samples; short_to_long: a token's weight in the shortest quarter of the responses over that
    in the longest.
    """
    own: list[Tensor] = []
    scores: list[Score] = []
    for name, other in variants(run).items():
        console.part(name)
        known = samples  # the reference log-probabilities only if the objective has a KL term
        if other.kl_placement == "none":
            known = [replace(s, reference_log_probs=None) for s in samples]
        compared, _ = with_advantages(known, other)
        gradient = make_learner(other, policy).gradient(compared)
        own = own or gradient.parameters
        square = dot(gradient.parameters, gradient.parameters)
        lengths = math.sqrt(square * dot(own, own))
        advantages = torch.tensor([s.advantage for s in compared], dtype=torch.float64)
        score = {
            "name": name,
            "axes": f"{other.loss.loss_type}, {other.length_norm.kind}, {other.baseline}/{other.std_norm}",
            "loss": gradient.loss,
            "grad_norm": math.sqrt(square),
            "cosine": dot(gradient.parameters, own) / lengths if lengths else None,
            "clipped": gradient.clipped / max(sum(s.length for s in compared), 1),
            "zero_advantage": (advantages == 0).double().mean().item(),
            "short_to_long": short_to_long(gradient.tokens, advantages),
        }
        scores.append(score)
        del gradient  # as large as the model: free it before the next one
    return scores


def dot(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """Return the inner product of two gradients, summed in double precision, parameter by parameter."""
    return sum((x.double() * y.double()).sum().item() for x, y in zip(a, b, strict=True))


def short_to_long(tokens: Sequence[Tensor], advantages: Tensor) -> float | None:
    """Return the weight of a token in the shortest quarter of the responses over that in the longest.

    It is |d loss / d log pi| / |A|, a mean over the tokens of responses with an advantage. None without any weight.
    `tokens`: gradients (length,) of each response.
    """
    live, weights = sorted((len(g), i) for i, g in enumerate(tokens) if advantages[i] != 0 and len(g)), []
    if not live:
        return None
    for part in (live[: -(-len(live) // 4)], live[-max(len(live) // 4, 1) :]):
        weight = sum(tokens[i].abs().double().sum().item() for _, i in part)
        weights.append(weight / sum(length * abs(advantages[i].item()) for length, i in part))
    return weights[0] / weights[1] if weights[1] else None


def read_run(folder: RunFolder) -> GRPOConfig:
    """Read the settings of a GRPO run. `ConfigError` for another algorithm."""
    run = OmegaConf.to_object(as_config(folder.settings))
    if not isinstance(run, GRPOConfig):
        algorithm = folder.settings.get("algorithm")
        raise ConfigError(f"RUN={folder.path} is a run of algorithm={algorithm}: give one of algorithm=grpo")
    return run


def read_samples(folder: RunFolder, run: GRPOConfig, step: int | None, console: Console) -> tuple[int, list[Sample]]:
    """Return the responses of a saved training step, by default of the last one, without advantages.

    Their old log-probabilities are those of the sampling policy, as the trainer scored it or, if it did not, as the
    engine reported it; so under the final policy the ratios differ from 1. If a KL term needs them, they have those of
    the run's start model too: loaded, or made again, with a warning if that one differs.
    """
    file, samples = folder.responses(step, rollouts=True), list[Sample]()
    for row in folder.rows(file, TO_LEARN).values():
        sample = sample_of(row)
        engine = sample.response.log_probs
        scores = engine if run.samples_ahead else sample.log_probs or engine
        samples.append(replace(sample, log_probs=scores, old_log_probs=scores))
    groups = list(dict.fromkeys(s.group for s in samples))[: run.questions]  # behind them, what refills replaced
    samples = [s for s in samples if s.group in groups]
    if run.kl_placement != "none":
        console.say("making the reference model of the KL term again ...")
        train = read_splits(run.data, console.say)[0] if run.model.made_on_the_spot else []
        reference = make_policy(run, train)
        start, recorded = teach_habits(run, reference, train, console), (folder.summary or {}).get("start")
        if start and recorded and start.weights != recorded["weights"]:
            console.say("! another processor, torch or version made another start model than the run's: KL is to this")
        of_reference = make_scorer(run, run, reference).log_probs(token_ids(samples))
        samples = [replace(s, reference_log_probs=row) for s, row in zip(samples, of_reference, strict=True)]
    return file.step or 0, samples


HEADING = """\
objective                      loss |gradient|  cosine  clipped zero adv. short:long  loss, length norm, advantage"""
LOOK_FOR = """
What to look for: cosine 1 means that an objective pushes the policy in the direction of this run's own, - that a
gradient is 0. short:long says how many times more one token of the shortest quarter of responses weighs than one of the
longest: 1 where every token weighs alike (constant, token) and nothing is clipped, above 1 where the loss divides by
each response's own length (masked_mean)."""


def table(scores: Sequence[Score]) -> str:
    """Format one line per objective for a terminal, and what to look for."""
    lines = [HEADING]
    for m in scores:
        cosine, ratio = ("-" if m[key] is None else f"{m[key]:.3f}" for key in ("cosine", "short_to_long"))
        sizes = f"{m['loss']:>9.3g} {m['grad_norm']:>10.3g} {cosine:>7}"
        shares = f"{m['clipped']:>8.1%} {m['zero_advantage']:>9.0%} {ratio:>10}"
        lines.append(f"{m['name']:<25} {sizes} {shares}  {m['axes']}")
    return "\n".join([*lines, LOOK_FOR])


def compare_gradients(folder: RunFolder, step: int | None, console: Console) -> Answer:
    """Compare the objectives on one step's rollouts, by default those of the last saved step."""
    register()
    run = read_run(folder)
    if not folder.model:
        raise ConfigError(f"RUN={folder.path} saved no model ({folder.status}): repeat it with save_model=true")
    with console.wait("comparing the objectives"):
        head = choose_types(run.model, run.rollout.engine, hardware_here())[1]
        policy = load_policy(str(folder.model), run.model.dtype, head_dtype=head)
        if run.model.freeze:
            freeze(policy.model, run.model.freeze)
        set_threads(run, policy)
        step, samples = read_samples(folder, run, step, console)
        scores = compare(run, policy, samples, console)
    numbers: dict[str, Any] = {"step": step, "samples": len(samples), "tokens": sum(s.length for s in samples)}
    numbers |= {"objectives": scores, "policy": "final"}
    file = folder.path / "lab" / f"step_{step:05d}.json"
    file.parent.mkdir(exist_ok=True)
    write_json(file, numbers, 1)
    heading = f"step {step}: {len(samples)} responses, {numbers['tokens']} tokens, scored by the final policy"
    text = f"\n{heading}\n\n{table(scores)}\n\nnumbers: {file}"
    return Answer(text, {"run": folder.path, **numbers, "numbers": file})
