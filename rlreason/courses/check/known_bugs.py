"""Known mistakes in advantages, averages and losses, to name the bug of a user's function.

A computation is made of steps, and a `Mistake` is a wrong function in the place of one of them. With `NO_MISTAKE` the
computations give what `rlreason.courses` gives, which a test checks. They never decide what is right.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlreason.courses.check.subject import Inputs, Mistake, known

_GROUPS = "the reshape or loop that forms the groups: which places belong to one question"
_STD = "the line that computes the standard deviation"
_EPS = "where advantage_eps enters the division"
_BASE = "what is subtracted from the rewards"
_FLAG = "the branch that decides what is divided by"
_NTH = "groups mix questions: a group takes every n-th response, not neighbours"
_IGNORED_EPS = "advantage_eps is ignored: a fixed number is added in its place"
_ORDER = "advantages are given back in another order than the responses"


def _columns(values: Tensor, size: int) -> Tensor:
    """Return the values (n,) in the order of the columns of their rows of `size`."""
    return values.reshape(-1, size).T.reshape(-1)


def _center(rows: Tensor, group: Tensor, baseline: str) -> Tensor:
    return rows - group.mean(1, keepdim=True) if baseline == "mean" else rows


# Steps: batch (f(rewards, size), rewards, size, eps); center (rows, group, baseline); others by what they return.
ADVANTAGE_MISTAKES = (
    *known("batch", _GROUPS,
        (_NTH, lambda f, r, n, eps: _columns(f(_columns(r, len(r) // n), n), n)),
        (_NTH, lambda f, r, n, eps: f(_columns(r, len(r) // n), n)),
        ("groups mix questions: group_size is used as the number of groups", lambda f, r, n, eps: f(r, len(r) // n)),
        ("groups mix questions: rows and columns of the groups are swapped",
         lambda f, r, n, eps: _columns(f(_columns(r, n), len(r) // n), len(r) // n)),
        ("groups mix questions: statistics are those of the whole batch", lambda f, r, n, eps: f(r, len(r))),
    ),
    *known("center", _GROUPS, ("groups mix questions: the mean is that of the whole batch",
                               lambda rows, group, baseline: rows - group.mean() if baseline == "mean" else rows)),
    *known("divided group", _GROUPS, ("groups mix questions: the divisor is that of the whole batch",
                                      lambda group: group.reshape(1, -1))),
    *known("batch", _GROUPS, ("groups mix questions: every group begins one place too late",
                              lambda f, r, n, eps: f(r.roll(-1), n).roll(1))),
    *known("group", _GROUPS, ("groups mix questions: the first group's statistics are used for all",
                              lambda rows: rows[:1].expand_as(rows))),
    *known("batch", _GROUPS,
        (_ORDER, lambda f, r, n, eps: f(r, n).flip(0)),
        (f"{_ORDER} (transposed)", lambda f, r, n, eps: _columns(f(r, n), n)),
    ),
    *known("std", _STD,
        ("the standard deviation divides by G, not by G - 1 (ddof 0)",
         lambda g: g.std(1, keepdim=True, unbiased=False)),
        ("divides by the variance, not by the standard deviation", lambda g: g.var(1, keepdim=True)),
    ),
    *known("normalizer", _FLAG,
        ("divides by the mean where the standard deviation is asked for", lambda n: "mean" if n == "std" else n),
        ("is not divided by the standard deviation where that is asked for", lambda n: "none" if n == "std" else n),
        ("is divided by the standard deviation although that is switched off", lambda n: "std" if n == "none" else n),
        ("divides by the standard deviation exactly where it should not (switch inverted)",
         lambda n: {"std": "none", "none": "std"}.get(n, n)),
    ),
    *known("divide", _EPS,
        ("advantage_eps is dropped: nothing is added to the divisor", lambda x, divisor, eps: x / divisor),
        ("advantage_eps stands under the root, beside the variance",
         lambda x, divisor, eps: x / (divisor.square() + eps).sqrt()),
        ("advantage_eps is a lower bound of the divisor, not added to it",
         lambda x, divisor, eps: x / divisor.clamp(min=eps)),
        (_IGNORED_EPS, lambda x, divisor, eps: x / (divisor + 1e-6)),
        (_IGNORED_EPS, lambda x, divisor, eps: x / (divisor + 1e-8)),
    ),
    *known("center", _BASE,
        ("the mean of the group is not subtracted", lambda rows, group, baseline: rows),
        ("the mean of the other responses is subtracted (leave one out)", lambda rows, group, baseline: (
            rows - (group.sum(1, keepdim=True) - rows) / (group.shape[1] - 1) if baseline == "mean" else rows)),
        ("the mean is subtracted although baseline is none",
         lambda rows, group, baseline: _center(rows, group, "mean")),
        ("the mean is subtracted exactly where baseline is none (switch inverted)",
         lambda rows, group, baseline: _center(rows, group, "none" if baseline == "mean" else "mean")),
    ),
    *known("mean", _FLAG,
        ("divides by the sum of the group where its mean is asked for", lambda g: g.sum(1, keepdim=True)),
        ("divides by the standard deviation where the mean is asked for", lambda g: g.std(1, keepdim=True)),
    ),
    *known("mean", _GROUPS, ("groups mix questions: divides by the mean of the whole batch", lambda g: g.mean())),
    *known("normalizer", _FLAG, ("is not divided by the mean where that is asked for",
                                 lambda n: "none" if n == "mean" else n)),
    *known("batch", "the order of the subtraction",
           ("advantages have the opposite sign", lambda f, r, n, eps: -f(r, n))),
    *known("batch", _GROUPS,
        ("groups mix questions: advantages are normalised once more over the whole batch",
         lambda f, r, n, eps: (f(r, n) - f(r, n).mean()) / (f(r, n).std() + eps)),
        ("groups mix questions: the mean of the whole batch is subtracted afterwards",
         lambda f, r, n, eps: f(r, n) - f(r, n).mean()),
    ),
    *known("batch", "the order of what is returned",
           ("the raw rewards are given back as advantages", lambda f, r, n, eps: r)),
    *known("batch", "the mean that is subtracted: of which dimension",
           ("all advantages are 0", lambda f, r, n, eps: f(r, n) * 0)),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class AdvantageOptions:
    """How advantages are computed, by the words of 2026."""

    group_size: int
    baseline: str  # mean or none
    eps: float
    normalizer: str  # std, mean or none


def wrong_advantages(rewards: Tensor, o: AdvantageOptions, m: Mistake) -> Tensor:
    """Return the advantages (n,) of rewards (n,) in consecutive groups, with one mistake."""

    def of_groups(flat: Tensor, size: int) -> Tensor:
        rows = flat.reshape(-1, size)
        group = m.at("group", lambda rows: rows)(rows)
        centered: Tensor = m.at("center", _center)(rows, group, o.baseline)
        group = m.at("divided group", lambda group: group)(group)
        normalizer = m.at("normalizer", lambda name: name)(o.normalizer)
        if normalizer == "none":
            return centered.reshape(-1)
        divisor = (
            m.at("std", lambda group: group.std(1, keepdim=True))(group)
            if normalizer == "std"
            else m.at("mean", lambda group: group.mean(1, keepdim=True))(group)
        )
        divided: Tensor = m.at("divide", lambda x, divisor, eps: x / (divisor + eps))(centered, divisor, o.eps)
        return divided.reshape(-1)

    right = lambda f, rewards, size, eps: f(rewards, size)  # noqa: E731
    advantages: Tensor = m.at("batch", right)(of_groups, rewards.reshape(-1), o.group_size, o.eps)
    return advantages


_REWARD = "the call of reward_fn, and what is read from the dictionary that it returns"
REWARD_MISTAKES = (
    *known("read", _REWARD,
        ("answer_reward is taken where the total, reward, is asked for", lambda parts: parts["answer_reward"]),
        ("format_reward is taken where the total, reward, is asked for", lambda parts: parts["format_reward"]),
        ("rewards are turned into 0 and 1", lambda parts: float(parts["reward"] > 0)),
    ),
    *known("pairs", _REWARD,
        ("reward_fn gets ground truth and response in swapped places",
         lambda texts, truths, size: zip(truths, texts, strict=True)),
        ("answers are misaligned: every response is judged by the first ground truth",
         lambda texts, truths, size: zip(texts, truths[:1] * len(truths), strict=True)),
        ("answers are misaligned: a response is judged by another one's ground truth",
         lambda texts, truths, size: zip(texts, truths[1:] + truths[:1], strict=True)),
        ("answers are misaligned: the ground truth at the place of the group is taken",
         lambda texts, truths, size: [(text, truths[place // size]) for place, text in enumerate(texts)]),
    ),
    *known("remember", _REWARD,
        ("a reward is remembered by its response alone: equal texts share it across questions",
         lambda text, truth: text),
        ("a reward is remembered by its ground truth alone: a group shares one reward", lambda text, truth: truth),
    ),
)  # fmt: skip


def wrong_rewards(i: Inputs, m: Mistake) -> Tensor:
    """Return the rewards (n,) of the responses, with one mistake."""
    pairs = m.at("pairs", lambda texts, truths, size: zip(texts, truths, strict=True))
    key = m.at("remember", lambda text, truth: (text, truth))
    read = m.at("read", lambda parts: parts["reward"])
    remembered: dict[Any, dict[str, float]] = {}
    rewards = []
    for text, truth in pairs(i["rollout_responses"], i["repeated_ground_truths"], i.get("group_size", 2)):
        parts = i["reward_fn"](text, truth)
        rewards.append(read(remembered.setdefault(key(text, truth), parts)))
    return torch.tensor(rewards)


_MASK = "where the mask is applied: which positions it is true for"
_ROWS = "what the sum over tokens is divided by"
_BATCH = "what the sum over rows is divided by"
_CONSTANT = "where the constant enters"
_GA = "where gradient_accumulation_steps enters"


def shifted(mask: Tensor, by: int) -> Tensor:
    """Return the mask (batch, seq) moved by one place to the right (1) or left (-1), false where nothing moves in."""
    blank = torch.zeros_like(mask[:, :1])
    return torch.cat([blank, mask[:, :-1]], 1) if by == 1 else torch.cat([mask[:, 1:], blank], 1)


def nth(mask: Tensor) -> Tensor:
    """Return for each place how many places up to it are in the mask."""
    return mask.long().cumsum(-1)


def nth_from_end(mask: Tensor) -> Tensor:
    """Return for each place how many places from it on are in the mask."""
    return mask.long().flip(-1).cumsum(-1).flip(-1)


_LATE = known("mask", _MASK, ("the mask is shifted by one: the first response token is lost", lambda m: shifted(m, 1)))
_EARLY = known("mask", _MASK, ("the mask is shifted by one: the last response token is lost", lambda m: shifted(m, -1)))
END_MISTAKES = known("mask", _MASK,
    ("the first response token is lost", lambda m: m & (nth(m) > 1)),
    ("the last response token is lost", lambda m: m & (nth_from_end(m) > 1)),
)  # fmt: skip
MASK_MISTAKES = (
    *known("mask", _MASK,
        ("the mask is ignored: prompt and padding positions count", torch.ones_like),
        ("the mask is upside down: prompt and padding count, the response does not", lambda m: ~m),
    ),
    *_LATE,
    *_EARLY,
    *known("mask", _MASK,
        ("the mask is shifted by one: the first response token is lost", lambda m: m.roll(1, -1)),
        ("the mask is shifted by one: the last response token is lost", lambda m: m.roll(-1, -1)),
        ("padding positions count", lambda m: nth(m) > 0),
        ("prompt positions count", lambda m: nth_from_end(m) > 0),
    ),
    *END_MISTAKES,
)  # fmt: skip
# Steps: rows and constant return the average of each row; batch joins them: (rows, counts, right).
ROW_MISTAKES = known("rows", _ROWS,
    ("all tokens of the (micro-)batch are averaged together, not row by row",
     lambda sums, counts, width: len(sums) * sums / counts.sum()),
    ("tokens are summed, not averaged", lambda sums, counts, width: sums),
    ("sums over tokens are divided by the padded width, not by the response's own tokens",
     lambda sums, counts, width: sums / width),
    ("sums over tokens are divided by the longest response, not by the response's own tokens",
     lambda sums, counts, width: sums / counts.max()),
)  # fmt: skip
BATCH_MISTAKES = known("batch average", _BATCH,
    ("rows are summed, not averaged", lambda rows, counts, join: rows.sum()),
    ("the sum is divided by the number of rows besides", lambda rows, counts, join: rows.mean()),
    ("remainder of a batch dropped: the last row does not count", lambda rows, counts, join: join(rows[:-1])),
    ("the loss is divided by the (micro-)batch's own tokens", lambda rows, counts, join: rows.sum() / counts.sum()),
)  # fmt: skip
CONSTANT_MISTAKES = known("constant", _CONSTANT,
    ("the constant is ignored", lambda sums, counts, width, c: sums),
    ("the constant divides twice", lambda sums, counts, width, c: sums / c**2),
    ("the constant multiplies", lambda sums, counts, width, c: sums * c),
    ("sums are divided by the tokens that count, not by the constant",
     lambda sums, counts, width, c: sums / counts.sum()),
    ("sums are divided by the padded width, not by the constant", lambda sums, counts, width, c: sums / width),
    ("the mean over tokens is divided by the constant, not their sum",
     lambda sums, counts, width, c: sums / counts.clamp(min=1) / c),
)  # fmt: skip
LOSS_SIGN_MISTAKES = known("loss sign", "the minus sign in front of the loss",
                           ("the loss has the opposite sign", lambda loss: -loss))  # fmt: skip


def wrong_average(loss: Tensor, mask: Tensor, how: str, constant: float, m: Mistake) -> Tensor:
    """Average per-token losses (batch, seq) to a scalar, with one mistake.

    `how` is sequence (mean of the rows' means), constant (masked sum / constant) or constant_mean (mean over rows of
    masked sum / constant).
    """
    weights = m.at("mask", lambda mask: mask)(mask.bool()).to(loss.dtype)
    sums, counts, width = (loss * weights).sum(-1), weights.sum(-1), loss.shape[-1]
    if how == "sequence":
        rows = m.at("rows", lambda sums, counts, width: sums / counts.clamp(min=1))(sums, counts, width)
    else:
        rows = m.at("constant", lambda sums, counts, width, c: sums / c)(sums, counts, width, constant)
    join = torch.sum if how == "constant" else torch.mean
    total = m.at("batch average", lambda rows, counts, join: join(rows))(rows, counts, join)
    signed: Tensor = m.at("loss sign", lambda loss: loss)(total)
    return signed


# The step `backward` returns what goes backward (None: nothing does) and what is returned.
STEP_MISTAKES = (
    *known("backward", _GA,
        ("gradient_accumulation_steps does not divide the loss", lambda loss, n: (loss, loss)),
        ("gradient_accumulation_steps divides the loss twice", lambda loss, n: (loss / n**2, loss / n**2)),
        ("gradient_accumulation_steps multiplies the loss", lambda loss, n: (loss * n, loss * n)),
    ),
    *known("backward", "the return line",
           ("the loss that is returned is not the one that goes backward (not divided)",
            lambda loss, n: (loss / n, loss))),
    *known("backward", "the call of backward",
           ("the loss that goes backward is not the one that is returned (not divided)",
            lambda loss, n: (loss, loss / n))),
    *LOSS_SIGN_MISTAKES,
    *known("backward", "the call of backward",
           ("backward is not called: there is no gradient", lambda loss, n: (None, loss / n))),
    *known("backward", "the calls of backward",
           ("the gradient is that of two backward calls", lambda loss, n: (2 * loss / n, loss / n))),
    *known("earlier gradient", "zero_grad, or grad = None",
           ("gradients of micro-batches are not added up: each call clears what was there", lambda gradient: None)),
)  # fmt: skip


def wrong_step(loss: Tensor, accumulation: int, leaf: Tensor, m: Mistake) -> Tensor:
    """Divide the loss by the micro-batches, call backward, return the loss; with one mistake."""
    leaf.grad = m.at("earlier gradient", lambda gradient: gradient)(leaf.grad)
    backward, returned = m.at("backward", lambda loss, n: (loss / n, loss / n))(loss, accumulation)
    if backward is not None:
        backward.backward()
    detached: Tensor = returned.detach()
    return detached


_RATIO = "the line that computes the ratio of new to old probabilities"
_CLIP = "the clip of the ratio, and which of the two terms is taken"
_ADV = "how the advantages meet the log-probabilities"
_GSPO = "the mean over the response that makes the sequence's ratio"
_METHOD = "the branch of this method"

SIGN_MISTAKES = known("sign", "the minus sign in front of the loss",
    ("the loss has the opposite sign: descending it makes good responses rarer", lambda loss: -loss))  # fmt: skip
CLIP_MISTAKES = (
    *known("pick", _CLIP,  # (the unclipped term, the clipped one, advantages)
        ("the larger of the two terms is taken, not the smaller (min and max swapped)", lambda u, c, a: u.maximum(c)),
        ("only the clipped term is used: the other one is never compared with it", lambda u, c, a: c),
        ("the clip is not applied", lambda u, c, a: u),
        ("the smaller ratio is taken before the advantage multiplies: wrong for negative ones",
         lambda u, c, a: u.minimum(c).where(a > 0, u.maximum(c))),
    ),
    *known("clip", _CLIP,
        ("the ratio is clipped above only", lambda ratio, c: ratio.clamp(max=1 + c)),
        ("the ratio is clipped below only", lambda ratio, c: ratio.clamp(min=1 - c)),
        ("the ratio is clipped around 0, not around 1", lambda ratio, c: ratio.clamp(-c, c)),
        ("the log of the ratio is clipped, not the ratio",
         lambda ratio, c: ratio.clamp(min=1e-9).log().clamp(-c, c).exp()),
        ("cliprange is ignored: 0.2 stands in its place", lambda ratio, c: ratio.clamp(0.8, 1.2)),
    ),
)  # fmt: skip
RATIO_MISTAKES = known("ratio", _RATIO,  # `mean` leaves tokens alone, or takes the mean over the sequence
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
    ("old and new log-probabilities are paired shifted by one",
     lambda new, old, mean: mean(new - old.roll(1, -1)).exp()),
)  # fmt: skip
TOKEN_ADVANTAGE_MISTAKES = (
    *known("advantage", _ADV,
        ("the advantage is not used", torch.ones_like),
        ("advantages are spread over positions, not over rows (broadcast along the wrong axis)",
         lambda a: a.reshape(1, -1)),
        ("every row gets the mean advantage of the batch", lambda a: a.mean().expand_as(a)),
        ("the advantages are normalised over the batch once more", lambda a: (a - a.mean()) / (a.std() + 1e-8)),
    ),
    *known("input", "which of the two this loss type takes",
           ("raw rewards and advantages are swapped", lambda right, other: other)),
    *known("advantage", _ADV, ("rows get one another's advantages", lambda a: a.flip(0))),
)  # fmt: skip
WEIGHT_MISTAKES = (
    *known("log-probability", "which of the two is multiplied",
           ("the probability is used where its logarithm belongs", torch.exp)),
    *known("unclipped", _RATIO, ("the ratio is multiplied with the log-probability besides",
                                 lambda ratio, a, new: ratio.detach() * a * new)),
    *known("log-probability", "what is detached", ("log-probabilities carry no gradient (detached)",
                                                   lambda new: new.detach() + 0 * new)),
)  # fmt: skip
SEQUENCE_MISTAKES = known("sequence mean", _GSPO,
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
METHOD_MISTAKES = known("method", _METHOD,
    ("the ratio is not used: the loss is that of plain policy gradients", lambda method: "none"),
    ("the clip is not applied", lambda method: "noclip"),
    ("the clip is applied where none is asked for", lambda method: "grpo"),
)  # fmt: skip
TIME_MISTAKES = known("time", "means inside the loss",
    ("tokens are averaged already: every position of a row has the row's mean",
     lambda loss: loss.mean(-1, keepdim=True).expand_as(loss)),
    ("the loss of each token is divided by the length of the row", lambda loss: loss / loss.shape[-1]),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class LossInputs:
    """Everything that a per-token loss is computed from: advantages (batch, 1), the other tensors (batch, seq)."""

    method: str  # none, noclip, grpo or gspo
    advantages: Tensor
    policy: Tensor
    old: Tensor | None = None
    cliprange: float = 0.0
    mask: Tensor | None = None  # only gspo reads it


def wrong_token_loss(i: LossInputs, m: Mistake) -> Tensor:
    """Return the loss of each token (batch, seq), with one mistake."""
    loss = -_surrogate(i, m.at("advantage", lambda a: a)(i.advantages), m)
    loss = m.at("sign", lambda loss: loss)(loss)
    timed: Tensor = m.at("time", lambda loss: loss)(loss)
    return timed


def _sequence_mean(gap: Tensor, mask: Tensor) -> Tensor:
    return (gap * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)


def _surrogate(i: LossInputs, a: Tensor, m: Mistake) -> Tensor:
    method, new = m.at("method", lambda method: method)(i.method), i.policy
    if method == "none" or i.old is None:
        weighted: Tensor = a * m.at("log-probability", lambda new: new)(new)
        return weighted
    mean: Callable[[Tensor], Tensor] = lambda gap: gap  # noqa: E731
    if method == "gspo":
        mask = torch.ones_like(new) if i.mask is None else i.mask.to(new.dtype)
        mean = lambda gap: m.at("sequence mean", _sequence_mean)(gap, mask)  # noqa: E731
    ratio = m.at("ratio", lambda new, old, mean: mean(new - old).exp())(new, i.old, mean).expand_as(new)
    unclipped: Tensor = m.at("unclipped", lambda ratio, a, new: a * ratio)(ratio, a, new)
    if method == "noclip":
        return unclipped
    clipped = m.at("clip", lambda ratio, c: ratio.clamp(1 - c, 1 + c))(ratio, i.cliprange) * a
    picked: Tensor = m.at("pick", lambda u, c, a: u.minimum(c))(unclipped, clipped, a)
    return picked


_APPLIED, _DIVISOR, _DIM = "where the mask is applied", "what the sum is divided by", "the dim of the sums"
#: Steps: divisor (count, size, constant, mask).
SLICE_MISTAKES = (
    *known("mask", _APPLIED,
        ("the mask is ignored", torch.ones_like),
        ("the mask is upside down", lambda m: ~m),
        ("the mask is shifted by one", lambda m: shifted(m, 1)),
        ("the mask is shifted by one", lambda m: shifted(m, -1)),
    ),
    *known("divisor", _DIVISOR,
        ("sums are divided by the number of masked-in elements", lambda count, size, c, mask: count),
        ("sums are divided by the number of elements besides",
         lambda count, size, c, mask: count * (count if c is None else c)),
        ("sums are divided by all elements, also those that are masked out", lambda count, size, c, mask: size),
        ("the sum is given back, not a mean", lambda count, size, c, mask: 1),
        ("slices are divided by the count of the whole mask", lambda count, size, c, mask: mask.sum()),
    ),
    *known("dim", _DIM,
        ("dim is ignored: everything is summed", lambda dim: None),
        ("dim is ignored: the last one is always taken", lambda dim: -1),
        ("dim is ignored: the first one is always taken", lambda dim: 0),
        ("the other dim is taken", lambda dim: None if dim is None else int(dim == 0)),
    ),
    *known("keepdim", "keepdim in the sums", ("the summed dimension is kept with size 1", lambda keepdim: True)),
    *known("dim", "how dim is tested: 0 is false in Python",
           ("dim=0 is taken for no dim at all", lambda dim: dim or None)),
)  # fmt: skip
NORMALIZE_MISTAKES = (
    *known("divisor", _DIVISOR,
        ("the constant is ignored", lambda count, size, c, mask: 1),
        ("the constant multiplies", lambda count, size, c, mask: 1 / c),
    ),
    *SLICE_MISTAKES,
)  # fmt: skip
MEAN_MISTAKES = (
    *SLICE_MISTAKES,
    *known("divisor", "the count where it is 0", ("a slice without any element gives 0 where the course asks for NaN",
                                                  lambda count, size, c, mask: count.clamp(min=1))),
)  # fmt: skip


def wrong_slices(value: Tensor, mask: Tensor, constant: float | None, dim: int | None, m: Mistake) -> Tensor:
    """Return `masked_normalize` by a constant, or `masked_mean` if that is None, with one mistake."""
    along, keepdim = m.at("dim", lambda dim: dim)(dim), m.at("keepdim", lambda keepdim: keepdim)(False)
    weights = m.at("mask", lambda mask: mask)(mask.bool()).to(value.dtype)

    def summed(x: Tensor) -> Tensor:
        return x.sum() if along is None else x.sum(along, keepdim=keepdim)

    right = lambda count, size, constant, mask: count if constant is None else constant  # noqa: E731
    divisor = m.at("divisor", right)(summed(weights), summed(torch.ones_like(weights)), constant, weights)
    average: Tensor = summed(value.masked_fill(weights == 0, 0.0)) / divisor
    return average
