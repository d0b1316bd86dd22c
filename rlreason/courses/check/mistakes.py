"""Known mistakes, to name the bug of a user's function or loop by what it returns.

A computation is made of steps, and a `Mistake` is a wrong function in the place of one of them. With `NO_MISTAKE` the
computations give what `rlreason.courses` gives, which a test checks. They never decide what is right.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlreason.courses.check.records import Function, Inputs, Options

RIGHT: dict[str, Function] = {}  # step -> the right function
MISTAKES: dict[str, list["Mistake"]] = {}  # step -> the wrong ones


@dataclass(frozen=True, slots=True)
class Mistake:
    """A wrong function in the place of one step of a computation."""

    step: str
    name: str
    where: str
    wrong: Function

    def __call__(self, step: str, *arguments: Any) -> Any:
        """Return the result of a step, which is wrong if the mistake is there."""
        return (self.wrong if step == self.step else RIGHT[step])(*arguments)


NO_MISTAKE = Mistake("", "", "", lambda: None)


def step(name: str, where: str, right: Function, *mistakes: tuple[str, Function]) -> None:
    """Add a step with its right function and its mistakes, from (name of the bug, wrong function)."""
    RIGHT[name] = right
    MISTAKES[name] = [Mistake(name, bug, where, wrong) for bug, wrong in mistakes]


def mistakes_in(*steps: str) -> list[Mistake]:
    """Return all mistakes of these steps, in order."""
    return [mistake for name in steps for mistake in MISTAKES[name]]


# Advantages. `batch` applies f(rewards (n,), size) to all groups; other steps take rows (groups, size) of rewards.
def _center(rows: Tensor, baseline: str) -> Tensor:
    return rows - rows.mean(1, keepdim=True) if baseline == "mean" else rows


def _leave_one_out(rows: Tensor, baseline: str) -> Tensor:
    others = (rows.sum(1, keepdim=True) - rows) / (rows.shape[1] - 1)
    return rows - others if baseline == "mean" else rows


_ACROSS = "groups mix questions: groups are made of responses to different questions, as by the wrong dim"
_DROPPED = "advantage_eps is dropped: nothing, or a fixed number, is added to the divisor"
step("batch", "the reshape or loop that forms the groups, and the order of what is returned",
    lambda f, r, n: f(r, n),
    ("groups mix questions: statistics are those of the whole batch", lambda f, r, n: f(r, len(r))),
    ("groups mix questions: group_size is used as the number of groups", lambda f, r, n: f(r, len(r) // n)),
    (_ACROSS, lambda f, r, n: f(r.reshape(n, -1).T.reshape(-1), n)),
    (_ACROSS, lambda f, r, n: f(r.reshape(-1, n).T.reshape(-1), len(r) // n).reshape(n, -1).T.reshape(-1)),
    ("advantages are given back in another order than the responses", lambda f, r, n: f(r, n).flip(0)),
    ("advantages have the opposite sign", lambda f, r, n: -f(r, n)),
    ("groups mix questions: advantages are normalised once more over the whole batch",
     lambda f, r, n: f(r, n) / f(r, n).std()),
    ("the raw rewards are given back as advantages", lambda f, r, n: r),
    ("all advantages are 0", lambda f, r, n: f(r, n) * 0),
)  # fmt: skip
step("center", "what is subtracted from the rewards", _center,
    ("groups mix questions: the mean is that of the whole batch", lambda rows, baseline: rows - rows.mean()),
    ("the mean of the group is not subtracted", lambda rows, baseline: rows),
    ("the mean of the other responses is subtracted (leave one out)", _leave_one_out),
    ("the mean is subtracted although baseline is none", lambda rows, baseline: _center(rows, "mean")),
)  # fmt: skip
step("normalizer", "the branch that decides what is divided by", lambda name: name,
    ("is not divided by the standard deviation where that is asked for", lambda n: "none" if n == "std" else n),
    ("is divided by the standard deviation although that is switched off", lambda n: "std" if n == "none" else n),
)  # fmt: skip
step("std", "the line that computes the standard deviation", lambda rows: rows.std(1, keepdim=True),
    ("the standard deviation divides by G, not by G - 1 (ddof 0)",
     lambda rows: rows.std(1, keepdim=True, unbiased=False)),
    ("divides by the variance, not by the standard deviation", lambda rows: rows.var(1, keepdim=True)),
    ("groups mix questions: the standard deviation is that of the whole batch", lambda rows: rows.std()),
)  # fmt: skip
step("mean", "what the rewards are divided by", lambda rows: rows.mean(1, keepdim=True),
    ("divides by the sum of the group where its mean is asked for", lambda rows: rows.sum(1, keepdim=True)),
    ("groups mix questions: divides by the mean of the whole batch", lambda rows: rows.mean()),
)  # fmt: skip
step("divide", "where advantage_eps enters the division", lambda x, divisor, eps: x / (divisor + eps),
    (_DROPPED, lambda x, divisor, eps: x / divisor),
    (_DROPPED, lambda x, divisor, eps: x / (divisor + 1e-8)),
    ("advantage_eps stands under the root, beside the variance",
     lambda x, divisor, eps: x / (divisor.square() + eps).sqrt()),
    ("advantage_eps is a lower bound of the divisor, not added to it",
     lambda x, divisor, eps: x / divisor.clamp(min=eps)),
)  # fmt: skip
ADVANTAGES = ("batch", "center", "std", "normalizer", "divide", "mean")


def wrong_advantages(rewards: Tensor, group_size: int, o: Options, m: Mistake) -> Tensor:
    """Return the advantages (n,) of rewards (n,) in consecutive groups, with one mistake."""

    def of_groups(flat: Tensor, size: int) -> Tensor:
        rows = flat.reshape(-1, size)
        advantages: Tensor = m("center", rows, o.baseline)
        normalizer = m("normalizer", o.advantage_normalizer)
        if normalizer != "none":
            advantages = m("divide", advantages, m(normalizer, rows), o.advantage_eps)
        return advantages.reshape(-1)

    advantages: Tensor = m("batch", of_groups, rewards.reshape(-1), group_size)
    return advantages


step("read", "what is read from the dictionary that reward_fn returns", lambda parts: parts["reward"],
    ("answer_reward is taken where the total, reward, is asked for", lambda parts: parts["answer_reward"]),
    ("format_reward is taken where the total, reward, is asked for", lambda parts: parts["format_reward"]),
    ("rewards are turned into 0 and 1", lambda parts: float(parts["reward"] > 0)),
)  # fmt: skip
step("returned", "the return line", lambda advantages, rewards: (advantages, rewards),
    ("advantages and raw rewards are returned in swapped places", lambda advantages, rewards: (rewards, advantages)),
)  # fmt: skip


def wrong_rewards(i: Inputs, m: Mistake) -> Tensor:
    """Return the rewards (n,) of the responses, with one mistake."""
    pairs = zip(i["rollout_responses"], i["repeated_ground_truths"], strict=True)
    return torch.tensor([m("read", i["reward_fn"](text, truth)) for text, truth in pairs])


# Averages. Masks are (batch, seq) bool.
def later(mask: Tensor) -> Tensor:
    """Return the mask (batch, seq) moved by one place to the right."""
    return torch.nn.functional.pad(mask, (1, 0))[:, :-1]


def sooner(mask: Tensor) -> Tensor:
    """Return the mask (batch, seq) moved by one place to the left."""
    return torch.nn.functional.pad(mask, (0, 1))[:, 1:]


def _nth(mask: Tensor) -> Tensor:
    """Return for each place how many places up to it are in the mask."""
    return mask.long().cumsum(-1)


def nth_from_end(mask: Tensor) -> Tensor:
    """Return for each place how many places from it on are in the mask."""
    return _nth(mask.flip(-1)).flip(-1)


step("mask", "where the mask is made and applied: which positions it is true for", lambda mask: mask,
    ("the mask is ignored: prompt and padding positions count", torch.ones_like),
    ("the mask is upside down: prompt and padding count, the response does not", lambda mask: ~mask),
    ("mask shifted by one: the first response token is lost", later),
    ("mask shifted by one: the last response token is lost", sooner),
    ("padding positions count", lambda mask: _nth(mask) > 0),
    ("prompt positions count", lambda mask: nth_from_end(mask) > 0),
    ("the first response token is lost", lambda mask: mask & (_nth(mask) > 1)),
    ("the last response token is lost", lambda mask: mask & (nth_from_end(mask) > 1)),
)  # fmt: skip
WIDTH = (
    "sums over tokens are divided by the padded width, the longest response or sampling_max_tokens, not by the "
    "response's own tokens"
)
step("rows", "what the sum over tokens is divided by", lambda sums, counts, width: sums / counts.clamp(min=1),
    ("all tokens of the (micro-)batch are averaged together, not row by row",
     lambda sums, counts, width: len(sums) * sums / counts.sum()),
    ("tokens are summed, not averaged", lambda sums, counts, width: sums),
    (WIDTH, lambda sums, counts, width: sums / width),
    (WIDTH, lambda sums, counts, width: sums / counts.max()),
)  # fmt: skip
step("batch average", "what the sum over rows is divided by", lambda rows, join: join(rows),
    ("rows are summed, not averaged", lambda rows, join: rows.sum()),
    ("the sum is divided by the number of rows besides", lambda rows, join: rows.mean()),
    ("remainder of a batch dropped: the last row does not count", lambda rows, join: join(rows[:-1])),
)  # fmt: skip
step("constant", "where the constant enters", lambda sums, counts, c: sums / c,
    ("the constant is ignored", lambda sums, counts, c: sums),
    ("the constant multiplies", lambda sums, counts, c: sums * c),
    ("sums are divided by the tokens that count, not by the constant", lambda sums, counts, c: sums / counts.sum()),
)  # fmt: skip
step("sign", "the minus sign in front of the loss", lambda loss: loss,
    ("the loss has the opposite sign: descending it makes good responses rarer", lambda loss: -loss),
)  # fmt: skip
AVERAGES = ("mask", "constant", "rows", "batch average", "sign")


def wrong_average(loss: Tensor, mask: Tensor, o: Options, m: Mistake) -> Tensor:
    """Average per-token losses (batch, seq) to a scalar, with one mistake."""
    weights = m("mask", mask.bool()).to(loss.dtype)
    sums, counts = (loss * weights).sum(-1), weights.sum(-1)
    if o.loss_normalization == "sequence" or m.step == "rows":
        rows = m("rows", sums, counts, loss.shape[-1])
    else:
        rows = m("constant", sums, counts, o.normalization_constant)
    join = torch.sum if o.loss_normalization == "constant" else torch.mean
    signed: Tensor = m("sign", m("batch average", rows, join))
    return signed


# `masked_mean` and `masked_normalize`: the divisor is made of what counts in each slice, of its size, and the constant.
step("slices", "what the sum is divided by", lambda count, size, c: count if c is None else c,
    ("the constant is ignored", lambda count, size, c: count * 0 + 1),
    ("slices are divided by the count of the whole mask", lambda count, size, c: count.sum()),
    ("sums are divided by the number of masked-in elements", lambda count, size, c: count),
    ("sums are divided by all elements, also those that are masked out", lambda count, size, c: size),
)  # fmt: skip
step("dim", "the dim of the sums", lambda dim: dim,
    ("dim is ignored: everything is summed", lambda dim: None),
    ("dim is ignored: the last one is always taken", lambda dim: -1),
    ("dim=0 is taken for no dim at all", lambda dim: dim or None),
)  # fmt: skip


def wrong_slices(i: Inputs, m: Mistake) -> Tensor:
    """Return `masked_normalize` by its constant, or `masked_mean` where it has none, with one mistake."""
    dim, weights = m("dim", i["dim"]), m("mask", i["mask"].bool()).to(i["tensor"].dtype)

    def summed(x: Tensor) -> Tensor:
        return x.sum() if dim is None else x.sum(dim)

    divisor = m("slices", summed(weights), summed(torch.ones_like(weights)), i.get("normalize_constant"))
    average: Tensor = summed(i["tensor"].masked_fill(weights == 0, 0.0)) / divisor
    return average


# `backward` returns what goes backward (None: nothing does) and what is returned.
step("backward", "where gradient_accumulation_steps divides, and the call of backward", lambda loss, n: (loss / n,) * 2,
    ("gradient_accumulation_steps does not divide the loss", lambda loss, n: (loss, loss)),
    ("gradient_accumulation_steps multiplies the loss", lambda loss, n: (loss * n, loss * n)),
    ("the loss that is returned is not the one that goes backward (not divided)", lambda loss, n: (loss / n, loss)),
    ("backward is not called: there is no gradient", lambda loss, n: (None, loss / n)),
    ("the gradient is that of two backward calls", lambda loss, n: (2 * loss / n, loss / n)),
)  # fmt: skip
step("earlier gradient", "zero_grad, or grad = None", lambda gradient: gradient,
    ("gradients of micro-batches are not added up: each call clears what was there", lambda gradient: None),
)  # fmt: skip


def wrong_step(loss: Tensor, accumulation: int, leaf: Tensor, m: Mistake) -> Tensor:
    """Divide the loss by the micro-batches, call backward, return the loss; with one mistake."""
    leaf.grad = m("earlier gradient", leaf.grad)
    backward, returned = m("backward", loss, accumulation)
    if backward is not None:
        backward.backward()
    detached: Tensor = returned.detach()
    return detached


# Losses of tokens. `mean` of a ratio leaves tokens alone, or takes the mean over the sequence.
def _sequence_mean(gap: Tensor, mask: Tensor) -> Tensor:
    return (gap * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)


step("advantage", "how the advantages meet the log-probabilities", lambda a: a,
    ("the advantage is not used", torch.ones_like),
    ("advantages are spread over positions, not over rows (broadcast along the wrong axis)",
     lambda a: a.reshape(1, -1)),
)  # fmt: skip
step("input", "which of the two this loss type takes", lambda right, other: right,
    ("raw rewards and advantages are swapped", lambda right, other: other),
)  # fmt: skip
step("method", "the branch of this method", lambda method: method,
    ("the ratio is not used: the loss is that of plain policy gradients", lambda method: "none"),
)  # fmt: skip
step("log-probability", "which of the two is multiplied, and what is detached", lambda new: new,
    ("the probability is used where its logarithm belongs", torch.exp),
    ("log-probabilities carry no gradient (detached)", lambda new: new.detach() + 0 * new),
)  # fmt: skip
step("ratio", "the line that computes the ratio of new to old probabilities",
    lambda new, old, mean: mean(new - old).exp(),
    ("the old log-probabilities are not used: the ratio is always 1",
     lambda new, old, mean: mean(new - new.detach()).exp()),
    ("gradient through old log-probabilities: old and new are the same tensor",
     lambda new, old, mean: mean(new - new).exp()),
    ("the ratio is upside down: old over new", lambda new, old, mean: mean(old - new).exp()),
    ("the log of the ratio is used as the ratio: exp is missing", lambda new, old, mean: mean(new - old)),
    ("the quotient of the log-probabilities is used as the ratio", lambda new, old, mean: new / old),
    ("the ratio carries no gradient (detached)", lambda new, old, mean: mean(new - old).exp().detach() + 0 * new),
    ("the ratio is that of the whole row, not of the token",
     lambda new, old, mean: (new - old).sum(-1, keepdim=True).exp()),
)  # fmt: skip
step("sequence mean", "the mean over the response that makes the sequence's ratio", _sequence_mean,
    ("prompt or padding positions in the sequence's ratio", lambda gap, mask: gap.mean(-1, keepdim=True)),
    ("the sequence's log-ratio is divided by the padded width, not by its own tokens",
     lambda gap, mask: (gap * mask).mean(-1, keepdim=True)),
    ("the sequence's ratio is a product, not a mean over its tokens (length is not divided out)",
     lambda gap, mask: (gap * mask).sum(-1, keepdim=True)),
    ("the sequence's ratio is a mean of ratios, not the exp of a mean of logs",
     lambda gap, mask: _sequence_mean(gap.exp(), mask).log()),
    ("the sequence's ratio carries no gradient (detached)",
     lambda gap, mask: _sequence_mean(gap, mask).detach() + 0 * gap),
    ("the ratio is that of each token, not of the sequence", lambda gap, mask: gap),
)  # fmt: skip
step("clip", "the clip of the ratio", lambda ratio, c: ratio.clamp(1 - c, 1 + c),
    ("the ratio is clipped above only", lambda ratio, c: ratio.clamp(max=1 + c)),
    ("the ratio is clipped below only", lambda ratio, c: ratio.clamp(min=1 - c)),
    ("the ratio is clipped around 0, not around 1", lambda ratio, c: ratio.clamp(-c, c)),
    ("cliprange is ignored: 0.2 stands in its place", lambda ratio, c: ratio.clamp(0.8, 1.2)),
)  # fmt: skip
step("pick", "which of the two terms is taken", lambda unclipped, clipped: unclipped.minimum(clipped),
    ("the larger of the two terms is taken, not the smaller (min and max swapped)",
     lambda unclipped, clipped: unclipped.maximum(clipped)),
    ("only the clipped term is used: the other one is never compared with it", lambda unclipped, clipped: clipped),
    ("the clip is not applied", lambda unclipped, clipped: unclipped),
)  # fmt: skip
step("time", "means inside the loss", lambda loss: loss,
    ("tokens are averaged already: every position of a row has the row's mean",
     lambda loss: loss.mean(-1, keepdim=True).expand_as(loss)),
)  # fmt: skip
LOSSES = ("pick", "clip", "ratio", "sequence mean", "input", "advantage", "log-probability", "time", "method")


def wrong_token_loss(o: Options, a: Tensor, new: Tensor, old: Tensor, mask: Tensor, m: Mistake) -> Tensor:
    """Return the loss of each token (batch, seq) by advantages a (batch, 1), with one mistake."""
    method, a = m("method", o.importance_reweighting_method), m("advantage", a)

    def mean(gap: Tensor) -> Tensor:
        of_row: Tensor = m("sequence mean", gap, mask.to(gap.dtype))
        return of_row if method == "gspo" else gap

    if method == "none":
        gain = a * m("log-probability", new)
    else:
        ratio = m("ratio", new, old, mean).expand_as(new)
        gain = ratio * a
        if method != "noclip":
            gain = m("pick", gain, m("clip", ratio, o.cliprange) * a)
    loss: Tensor = m("time", -gain)
    return loss


# `tokenize_prompt_and_output`: `tokens` takes its right result, (labels, response mask, input ids, pad id).
BY_VALUE = "the mask comes from the value of the token: an end token equal to the pad is lost"
step("tokens", "the slices that make labels and response_mask, and where the mask begins and ends",
    lambda labels, mask, ids, pad: (labels, mask),
    ("labels are not shifted: each is the token that stands at its own position",
     lambda labels, mask, ids, pad: (ids, mask)),
    ("mask covers the last prompt token besides the response",
     lambda labels, mask, ids, pad: (labels, mask | sooner(mask))),
    (BY_VALUE, lambda labels, mask, ids, pad: (labels, mask & (labels != pad))),
)  # fmt: skip


# `compute_entropy` and `get_response_log_probs`.
def _entropy(logits: Tensor, dim: int = -1) -> Tensor:
    return _plogp(logits.softmax(dim), logits.log_softmax(dim))


def _plogp(p: Tensor, logp: Tensor) -> Tensor:
    return -(p * logp).sum(-1)


def _gather(values: Tensor, labels: Tensor) -> Tensor:
    return values.gather(-1, labels[..., None])[..., 0]


POSITIONS = "the softmax runs over positions, not over the vocabulary"
_NEXT = "shifted by one: the label of the next position is scored (labels are shifted already)"
step("entropy", "the logarithm, what it is multiplied with, and the sum over the vocabulary", _entropy,
    ("entropies are in bits: the logarithm has base 2", lambda z: _entropy(z) / math.log(2)),
    ("entropies have the opposite sign", lambda z: -_entropy(z)),
    ("the mean over the vocabulary is taken, not the sum", lambda z: _entropy(z) / z.shape[-1]),
    (POSITIONS, lambda z: _entropy(z, 1)),
    ("raw logits are used as log-probabilities", lambda z: _plogp(z.exp(), z)),
    ("the logarithm is missing: probabilities are multiplied with themselves",
     lambda z: _plogp(z.softmax(-1), z.softmax(-1))),
    ("probabilities are multiplied with raw logits, not with log-probabilities", lambda z: _plogp(z.softmax(-1), z)),
    ("large logits overflow: exponentials are taken of raw logits",
     lambda z: _plogp(z.exp() / z.exp().sum(-1, keepdim=True), (z.exp() / z.exp().sum(-1, keepdim=True)).log())),
    ("a logarithm is taken of the softmax: probabilities that underflow to 0 give NaN",
     lambda z: _plogp(z.softmax(-1), z.softmax(-1).log())),
)  # fmt: skip
step("gather", "the index of gather, and the slices of logits and labels",
    lambda values, labels, ids: _gather(values, labels),
    ("input_ids are scored in place of labels", lambda values, labels, ids: _gather(values, ids)),
    (_NEXT, lambda values, labels, ids: _gather(values, labels.roll(-1, -1))),
    (_NEXT, lambda values, labels, ids: torch.nn.functional.pad(_gather(values, labels.roll(-1, -1))[:, :-1], (0, 1))),
)  # fmt: skip
step("log", "the log_softmax", lambda z: z.log_softmax(-1),
    ("raw logits are given back: they are not normalised", lambda z: z),
    ("probabilities are given back, not their logarithms", lambda z: z.softmax(-1)),
    ("log-probabilities have the opposite sign", lambda z: -z.log_softmax(-1)),
    (POSITIONS, lambda z: z.log_softmax(1)),
)  # fmt: skip
step("result", "no_grad and detach", lambda log_probs: log_probs,
    ("log-probabilities carry no gradient: nothing can be learned from them", torch.detach),
)  # fmt: skip


def wrong_log_probs(i: Inputs, m: Mistake) -> dict[str, Tensor]:
    """Return the result of `get_response_log_probs`, with one mistake."""
    logits = i["model"](i["input_ids"]).logits
    log_probs = m("gather", m("log", logits), i["labels"], i["input_ids"])
    return {"log_probs": m("result", log_probs), "token_entropy": m("entropy", logits)}
