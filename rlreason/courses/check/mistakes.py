"""Known mistakes, to name the bug of a user's function or loop by what it returns.

A computation is made of steps, and a `Mistake` is a wrong function in the place of one of them. `NO_MISTAKE` is right.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from rlreason.courses.check.calling import Function, Inputs, Kind


@dataclass(frozen=True, slots=True)
class Mistake:
    """A wrong function in the place of one step of a computation."""

    step: str
    kind: Kind
    wrong: Function

    def __call__(self, step: str, *arguments: Any) -> Any:
        """Return the result of a step, which is wrong if the mistake is there."""
        return (self.wrong if step == self.step else STEPS[step][1])(*arguments)


NO_MISTAKE = Mistake("", ("", ""), lambda: None)


@dataclass(frozen=True)
class Options:
    """What decides an objective, by the names of 2026's train step."""

    importance_reweighting_method: str = "none"  # or noclip, grpo or gspo
    baseline: str = "mean"  # or none
    advantage_normalizer: str = "std"  # or mean or none
    advantage_eps: float = 1e-6
    cliprange: float = 0.2
    loss_normalization: str = "sequence"  # mean of rows' means; constant: masked sum / constant; or constant_mean
    normalization_constant: float = 1.0
    max_grad_norm: float = 1e6
    temperature: float = 1.0


METHOD_OF = {"no_baseline": "none", "reinforce_with_baseline": "none", "grpo_clip": "grpo"}  # by the name of 2025


def options_of(named: Inputs) -> Options:
    """Return the options among the arguments of a function, or the settings of a loop, of either year."""
    options = {field.name: named[field.name] for field in fields(Options) if field.name in named}
    for name in ("normalize_by_std", "use_std_normalization"):
        if name in named:
            options["advantage_normalizer"] = "std" if named[name] else "none"
    if "normalize_constant" in named:
        options |= {"loss_normalization": "constant_mean", "normalization_constant": named["normalize_constant"]}
    if "loss_type" in named:
        options["importance_reweighting_method"] = METHOD_OF[named["loss_type"]]
    elif "advantages" in named:
        options["importance_reweighting_method"] = "grpo"
    return Options(**options, temperature=named.get("sampling_temperature", 1.0))


def _center(rows: Tensor, baseline: str) -> Tensor:
    return rows - rows.mean(1, keepdim=True) if baseline == "mean" else rows


def _moved(mask: Tensor, places: int) -> Tensor:
    """Return the mask (batch, seq) moved to the right."""
    return torch.nn.functional.pad(mask, (places, -places))


def _nth_from_end(mask: Tensor) -> Tensor:
    """Return for each place how many places from it on are in the mask."""
    return mask.long().flip(-1).cumsum(-1).flip(-1)


def _sequence_mean(gap: Tensor, mask: Tensor) -> Tensor:
    return (gap * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)


def gather(values: Tensor, labels: Tensor) -> Tensor:
    """Return the value (..., places) of each label among those at its place (..., places, vocab)."""
    return values.gather(-1, labels[..., None])[..., 0]


def log_probs_of(logits: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Return the log-probabilities (rows, places) of labels, each behind the logits at its place."""
    return gather((logits[:, : labels.shape[1]] / temperature).log_softmax(-1), labels)


def _clipped_parts(u: Any, gradient: Tensor) -> Tensor:
    """Return the gradient at the step if it is clipped after each micro-batch."""
    total = torch.zeros_like(gradient)
    for samples in u.passes:
        total = u.clipped(total + u.gradient_of(NO_MISTAKE, [samples]))
    return total


DROPPED = "advantage_eps is dropped: nothing, or a fixed number, is added to the divisor"
TEMPERATURE = "temperature ignored or applied twice where log-probabilities are computed"
WIDTH = (
    "sums over tokens are divided by the padded width, the longest response or sampling_max_tokens, not by the "
    "response's own tokens"
)
#: Step -> where to look, the right function, and (name of the bug, wrong function).
STEPS: dict[str, tuple[str, Function, list[tuple[str, Function]]]] = {
    # Loops: the arguments are an `Update` u and the gradient of its loss.
    "step": ("the calls of zero_grad, backward, clip_grad_norm_ and step: which gradients, of which model, and when",
             lambda u, gradient: u.clipped(gradient), [
        ("the gradient is not clipped", lambda u, gradient: gradient),
        ("gradients of two steps add up: zero_grad is missing or at the wrong place",
         lambda u, gradient: u.clipped(gradient + u.before)),
        ("each entry of the gradient is clipped, not its norm",
         lambda u, gradient: gradient.clamp(-u.options.max_grad_norm, u.options.max_grad_norm)),
        ("nothing reaches the optimizer: gradients are cleared before the step, or a copy of the policy has them",
         lambda u, gradient: gradient * 0 if any(f.learned for f in u.forwards) else None),
        ("only the last micro-batch reaches the optimizer: zero_grad is called between micro-batches",
         lambda u, gradient: u.clipped(u.gradient_of(NO_MISTAKE, u.passes[-1:]))),
        ("the gradient is clipped after each micro-batch, not once before the step", _clipped_parts),
        ("the gradient is clipped to another norm than max_grad_norm",
         lambda u, gradient: (
             u.clipped(gradient) * u.at_step.norm() / u.options.max_grad_norm if u.at_step.norm() > 0 else None))]),
    # Advantages. `batch` applies f(rewards (n,), size) to all groups; other steps take rows (groups, size) of rewards.
    "batch": ("the reshape or loop that forms the groups, and the order of what is returned", lambda f, r, n: f(r, n), [
        ("groups mix questions: statistics are those of the whole batch", lambda f, r, n: f(r, len(r))),
        ("groups mix questions: group_size is used as the number of groups", lambda f, r, n: f(r, len(r) // n)),
        ("groups mix questions: groups are made of responses to different questions, as by the wrong dim",
         lambda f, r, n: f(r.reshape(n, -1).T.reshape(-1), n).reshape(-1, n).T.reshape(-1)),
        ("groups mix questions: advantages are normalised once more over the whole batch",
         lambda f, r, n: f(r, n) / f(r, n).std())]),
    "center": ("what is subtracted from the rewards", _center, [
        ("groups mix questions: the mean is that of the whole batch", lambda rows, baseline: rows - rows.mean()),
        ("the mean of the group is not subtracted", lambda rows, baseline: rows),
        ("the mean is subtracted although baseline is none", lambda rows, baseline: _center(rows, "mean"))]),
    "std": ("the line that computes the standard deviation", lambda rows: rows.std(1, keepdim=True), [
        ("the standard deviation divides by G, not by G - 1 (ddof 0)",
         lambda rows: rows.std(1, keepdim=True, unbiased=False))]),
    "normalizer": ("the branch that decides what is divided by", lambda name: name, [
        ("is not divided by the standard deviation where that is asked for", lambda n: "none" if n == "std" else n),
        ("is divided by the standard deviation although that is switched off",
         lambda n: "std" if n == "none" else n)]),
    "divisor": ("where advantage_eps enters the division", lambda std, eps: std + eps, [
        (DROPPED, lambda std, eps: std),
        (DROPPED, lambda std, eps: std + 1e-8),
        ("advantage_eps stands under the root, beside the variance", lambda std, eps: (std.square() + eps).sqrt())]),
    "read": ("what is read from the dictionary that reward_fn returns", lambda parts: parts["reward"], [
        ("answer_reward is taken where the total, reward, is asked for", lambda parts: parts["answer_reward"])]),
    "labels": ("the slices that make labels, and the index of gather", lambda labels, ids: labels, [
        ("labels are not shifted: each position has its own token, as in input_ids, for its label",
         lambda labels, ids: ids),
        ("shifted by one: the label of the next position is scored (labels are shifted already)",
         lambda labels, ids: labels.roll(-1, -1))]),
    # Averages. Masks are (batch, seq) bool.
    "mask": ("where the mask is made and applied: which positions it is true for", lambda mask: mask, [
        ("the mask is ignored: prompt and padding positions count", torch.ones_like),
        ("the mask is upside down: prompt and padding count, the response does not", lambda mask: ~mask),
        ("mask shifted by one: the first response token is lost", lambda mask: _moved(mask, 1)),
        ("mask shifted by one: the last response token is lost", lambda mask: _moved(mask, -1)),
        ("mask covers the last prompt token besides the response", lambda mask: mask | _moved(mask, -1)),
        ("padding positions count", lambda mask: mask.cumsum(-1) > 0),
        ("prompt positions count", lambda mask: _nth_from_end(mask) > 0),
        ("the last response token is lost", lambda mask: mask & (_nth_from_end(mask) > 1))]),
    "rows": ("what the sum over tokens is divided by", lambda counts, width: counts.clamp(min=1), [
        ("all tokens of the (micro-)batch are averaged together, not row by row", lambda counts, width: counts.mean()),
        ("tokens are summed, not averaged", lambda counts, width: 1),
        (WIDTH, lambda counts, width: width),
        (WIDTH, lambda counts, width: counts.max())]),
    "batch average": ("what the sum over rows is divided by", lambda rows, join: join(rows), [
        ("rows are summed, not averaged", lambda rows, join: rows.sum()),
        ("the sum is divided by the number of rows besides", lambda rows, join: rows.mean())]),
    "sign": ("the minus sign in front of the loss", lambda loss: loss, [
        ("the loss has the opposite sign: descending it makes good responses rarer", lambda loss: -loss)]),
    # `masked_mean` and `masked_normalize`: the divisor is made of what counts in a slice, its size, and the constant.
    "slices": ("what the sum is divided by", lambda count, size, c: count if c is None else c, [
        ("nothing divides the sum: the constant, or the count, is ignored", lambda count, size, c: count * 0 + 1),
        ("sums are divided by all elements, also those that are masked out", lambda count, size, c: size)]),
    # `backward` returns what goes backward (None: nothing does) and what is returned.
    "backward": ("where gradient_accumulation_steps divides, and the call of backward", lambda x, n: (x / n, x / n), [
        ("gradient_accumulation_steps does not divide the loss", lambda x, n: (x, x)),
        ("the loss that is returned is not the one that goes backward (not divided)", lambda x, n: (x / n, x)),
        ("backward is not called: there is no gradient", lambda x, n: (None, x / n))]),
    # Losses of tokens.
    "pick": ("which of the two terms is taken", lambda unclipped, clipped: unclipped.minimum(clipped), [
        ("the larger of the two terms is taken, not the smaller (min and max swapped)",
         lambda unclipped, clipped: unclipped.maximum(clipped)),
        ("only the clipped term is used: the other one is never compared with it", lambda unclipped, clipped: clipped),
        ("the clip is not applied", lambda unclipped, clipped: unclipped)]),
    "clip": ("the clip of the ratio", lambda ratio, c: ratio.clamp(1 - c, 1 + c), [
        ("the ratio is clipped above only", lambda ratio, c: ratio.clamp(max=1 + c)),
        ("cliprange is ignored: 0.2 stands in its place", lambda ratio, c: ratio.clamp(0.8, 1.2))]),
    "gap": ("the line that computes the ratio of new to old probabilities", lambda new, old: new - old, [
        ("the old log-probabilities are not used: the ratio is always 1", lambda new, old: new - new.detach()),
        ("gradient through old log-probabilities: old and new are the same tensor", lambda new, old: new - new),
        ("the ratio is upside down: old over new", lambda new, old: old - new)]),
    "exp": ("the line that computes the ratio of new to old probabilities", torch.exp, [
        ("the log of the ratio is used as the ratio: exp is missing", lambda gap: gap),
        ("the ratio carries no gradient (detached)", lambda gap: gap.exp().detach() + 0 * gap)]),
    "sequence mean": ("the mean over the response that makes the sequence's ratio", _sequence_mean, [
        ("prompt or padding positions in the sequence's ratio", lambda gap, mask: gap.mean(-1, keepdim=True)),
        ("the sequence's ratio is a product, not a mean over its tokens (length is not divided out)",
         lambda gap, mask: (gap * mask).sum(-1, keepdim=True)),
        ("the sequence's ratio is a mean of ratios, not the exp of a mean of logs",
         lambda gap, mask: _sequence_mean(gap.exp(), mask).log()),
        ("the ratio is that of each token, not of the sequence", lambda gap, mask: gap)]),
    "input": ("which of the two this loss type takes", lambda right, other: right, [
        ("raw rewards and advantages are swapped", lambda right, other: other)]),
    "log-probability": ("which of the two is multiplied, and what is detached", lambda new: new, [
        ("the probability is used where its logarithm belongs", torch.exp),
        ("log-probabilities carry no gradient (detached)", lambda new: new.detach() + 0 * new)]),
    # `get_response_log_probs`.
    "log": ("the log_softmax", lambda z: z.log_softmax(-1), [
        ("raw logits are given back: they are not normalised", lambda z: z),
        ("probabilities are given back, not their logarithms", lambda z: z.softmax(-1)),
        ("the softmax runs over positions, not over the vocabulary", lambda z: z.log_softmax(1))]),
    # Loops: the arguments are of an `Update` u. A micro-batch of n rows has a weight, its share.
    "score": ("where log-probabilities are computed: temperature, and slices of logits and labels", log_probs_of, [
        (TEMPERATURE, lambda z, labels, t: log_probs_of(z, labels, 1.0)),
        (TEMPERATURE, lambda z, labels, t: log_probs_of(z, labels, t * t)),
        ("shifted by one: positions learn their own token again, not the next one",
         lambda z, labels, t: log_probs_of(z, labels.roll(1, 1), t)),
        ("mask shifted by one: response tokens are lost and neighbours are learned instead",
         lambda z, labels, t: log_probs_of(torch.cat([z[:, 1:], z[:, -1:]], 1), labels, t))]),
    "response": ("how the response mask is built: it covers the end token, too", lambda mask, truncated: mask, [
        ("end tokens have weight 0: nothing teaches the policy to stop",
         lambda mask, truncated: mask & (truncated | (_nth_from_end(mask) > 1)))]),
    "share": ("what the sum over responses is divided by, and where gradient_accumulation_steps divides",
              lambda n, u: 1.0 if u.options.loss_normalization == "constant" else n / u.size, [
        ("responses are summed, not averaged: their number divides nowhere", lambda n, u: n),
        ("the loss is divided by the micro-batches, however many rows they have, or besides a constant",
         lambda n, u: 1 / len(u.passes)),
        ("responses to questions whose rewards are all equal are dropped, and the mean is taken over fewer",
         lambda n, u: n / len(u.samples)),
        ("micro-batches are added up without dividing: the gradient grows with their number", lambda n, u: 1)]),
    "old": ("where old log-probabilities are computed: in which loop, and at which temperature", lambda s, u: s.old, [
        ("old log-probabilities are computed again in each epoch, not once with the samples",
         lambda s, u: s.scored_by(u.epoch_began, u.options.temperature)),
        ("old log-probabilities are taken at temperature 1, new ones at the sampling temperature",
         lambda s, u: s.scored_by(u.sampler, 1.0))]),
    "groups": ("how responses are gathered into groups: by their question, before a batch is cut or shuffled",
               lambda u: [s.place for s in u.rollout], [
        ("groups mix questions: neighbours in the list of samples are taken for a group",
         lambda u: [number // u.settings["group_size"] for number in range(len(u.rollout))]),
        ("groups mix questions: those that have the same ground truth are taken for one group",
         lambda u: [s.truth for s in u.rollout])]),
}  # fmt: skip


#: All known mistakes. One that a computation has no place for changes nothing there.
MISTAKES = [Mistake(step, (bug, where), f) for step, (where, _, bugs) in STEPS.items() for bug, f in bugs]


def first_that(gives: Callable[[Mistake], bool]) -> Mistake | None:
    """Return the first mistake for which this is true; one that makes nonsense of a case may raise."""
    for mistake in MISTAKES:
        with suppress(Exception):
            if gives(mistake):
                return mistake
    return None


def wrong_advantages(rewards: Tensor, group_size: int, o: Options, m: Mistake) -> Tensor:
    """Return the advantages (n,) of rewards (n,) in consecutive groups, with one mistake."""

    def of_groups(flat: Tensor, size: int) -> Tensor:
        rows = flat.reshape(-1, size)
        advantages: Tensor = m("center", rows, o.baseline)
        normalizer = m("normalizer", o.advantage_normalizer)
        if normalizer != "none":
            divisor = m("std", rows) if normalizer == "std" else rows.mean(1, keepdim=True)
            advantages = advantages / m("divisor", divisor, o.advantage_eps)
        return advantages.reshape(-1)

    advantages: Tensor = m("batch", of_groups, rewards.reshape(-1), group_size)
    return advantages


def wrong_rewards(i: Inputs, m: Mistake) -> Tensor:
    """Return the rewards (n,) of the responses, with one mistake."""
    pairs = zip(i["rollout_responses"], i["repeated_ground_truths"], strict=True)
    return torch.tensor([m("read", i["reward_fn"](text, truth)) for text, truth in pairs])


def wrong_average(loss: Tensor, mask: Tensor, o: Options, m: Mistake) -> Tensor:
    """Average per-token losses (batch, seq) to a scalar, with one mistake."""
    weights = m("mask", mask.bool()).to(loss.dtype)
    sums, counts = (loss * weights).sum(-1), weights.sum(-1)
    if o.loss_normalization == "sequence" or m.step == "rows":
        rows = sums / m("rows", counts, loss.shape[-1])
    else:
        rows = sums / o.normalization_constant
    join = torch.sum if o.loss_normalization == "constant" else torch.mean
    average: Tensor = m("batch average", rows, join)
    return average


def wrong_slices(i: Inputs, m: Mistake) -> Tensor:
    """Return `masked_normalize` by its constant, or `masked_mean` where it has none, with one mistake."""
    mask, dim = m("mask", i["mask"].bool()), i["dim"]
    divisor = m("slices", mask.sum(dim), torch.ones_like(mask).sum(dim), i.get("normalize_constant"))
    average: Tensor = i["tensor"].where(mask, 0.0).sum(dim) / divisor
    return average


def wrong_token_loss(o: Options, a: Tensor, new: Tensor, old: Tensor, mask: Tensor, m: Mistake) -> Tensor:
    """Return the loss of each token (batch, seq) by advantages a (batch, 1), with one mistake."""
    method = o.importance_reweighting_method
    if method == "none":
        gain: Tensor = a * m("log-probability", new)
    else:
        gap = m("gap", new, old)
        if method == "gspo":
            gap = m("sequence mean", gap, mask.to(gap.dtype))
        ratio = m("exp", gap).expand_as(new)
        gain = ratio * a
        if method != "noclip":
            gain = m("pick", gain, m("clip", ratio, o.cliprange) * a)
    loss: Tensor = m("sign", -gain)
    return loss
