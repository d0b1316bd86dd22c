"""The micro-batch steps of 2025, which go backward by themselves."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rlreason.courses import cs336_2025, cs336_2026
from rlreason.courses.check.calling import Yours, answer_parts, fresh, tensor
from rlreason.courses.check.engine import smaller_tensors
from rlreason.courses.check.functions.losses import SPANS, dispatched_wrong, step_knobs
from rlreason.courses.check.functions.scoring import (
    advantages,
    given,
    log_probs,
    ragged_mask,
    small_model,
    word_tokenizer,
)
from rlreason.courses.check.loop import judge
from rlreason.courses.check.loop.gradients import of_truths, seen_weights, with_gradients
from rlreason.courses.check.loop.recording import Options, RecordedSample, RecordedSGD, RecordedUpdate, Recorder, scored
from rlreason.courses.check.loop.weights import not_a_mean, numbers, unlike
from rlreason.courses.check.subject import (
    Bug,
    CallCase,
    Fault,
    Function,
    Inputs,
    Knobs,
    NotWrittenError,
    Seen,
    Subject,
    UnwrittenFault,
    short_text,
)
from rlreason.courses.check.wrong import averages, tokens


def observe_step(function: Function, inputs: Inputs) -> Seen:
    """Of a step that goes backward: its loss, the gradient after one call and after two."""
    call = fresh(given(inputs), "policy_log_probs")
    leaf = call["policy_log_probs"]
    loss, _ = answer_parts(function(**call), ("loss", "metadata"))
    seen = {"loss": tensor(loss, "the loss", scalar=True), "gradient of policy_log_probs": _grad(leaf)}
    function(**call)
    seen["gradient after a second call"] = _grad(leaf)
    return seen


def _grad(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.clone()


def _sft_cases() -> list[CallCase]:
    cases = []
    for number, (accumulation, constant) in enumerate(((2, 1.0), (4, 5.0), (1, 3.0), (3, 1.0))):
        rows = 3 if number < 3 else 2
        mask = ragged_mask([(s, min(n, 6 - s)) for s, n in SPANS[:rows]], 6)
        inputs: Inputs = {
            "policy_log_probs": log_probs(rows, 6, 50 + number, mask)[0],
            "response_mask": mask,
            "gradient_accumulation_steps": accumulation,
            "normalize_constant": constant,
        }
        cases.append(
            CallCase(inputs, about=f"gradient_accumulation_steps={accumulation}, normalize_constant={constant}")
        )
    return cases


def _sft_wrong(knobs: Knobs) -> Function:
    def wrong(
        policy_log_probs: Tensor,
        response_mask: Tensor,
        gradient_accumulation_steps: int,
        normalize_constant: float,
    ) -> tuple[Tensor, dict[str, Any]]:
        how = "sequence" if "rows" in knobs else "constant_mean"
        loss = averages.aggregate(-policy_log_probs, response_mask, how, normalize_constant, knobs)
        return averages.micro_batch_step(loss, gradient_accumulation_steps, policy_log_probs, knobs), {}

    return wrong


_STEP_ROWS = ("policy_log_probs", "response_mask", "raw_rewards", "advantages", "old_log_probs")
_STEP_COLUMNS = ("policy_log_probs", "response_mask", "old_log_probs")


def _smaller_step(inputs: Inputs) -> Iterator[Inputs]:
    for smaller in smaller_tensors(inputs, _STEP_ROWS, _STEP_COLUMNS, (*_STEP_ROWS, "cliprange")):
        if bool(smaller["response_mask"].any(-1).all()):  # a row without tokens is no fair trial
            yield smaller


SFT = Subject(
    "sft_microbatch_train_step",
    "cs336_2025",
    ("policy_log_probs", "response_mask", "gradient_accumulation_steps", "normalize_constant"),
    cs336_2025.sft_microbatch_train_step,
    _sft_cases,
    observe_step,
    _sft_wrong,
    step_knobs("mask", "batch", "constant", "accumulation", "loss_sign", "backward", "rows"),
    _smaller_step,
)


def _grpo_cases() -> list[CallCase]:
    cases = []
    for loss_type in ("no_baseline", "reinforce_with_baseline", "grpo_no_clip", "grpo_clip"):
        for number, (accumulation, c) in enumerate(((2, 0.2), (1, 0.1), (4, 0.5))):
            rows = 4 - number
            mask = ragged_mask([(s, min(n, 6 - s)) for s, n in SPANS[:rows]], 6)
            policy, old = log_probs(rows, 6, 60 + number, mask)
            inputs: Inputs = {
                "policy_log_probs": policy,
                "response_mask": mask,
                "gradient_accumulation_steps": accumulation,
                "loss_type": loss_type,
                "raw_rewards": torch.tensor([1.0, 0.0, 0.5, 1.0])[:rows, None].clone(),
                "advantages": advantages(rows, number),
                "old_log_probs": old,
                "cliprange": c,
            }
            about = f"loss_type={loss_type}, gradient_accumulation_steps={accumulation}"
            cases.append(CallCase(inputs, branch=loss_type, about=about))
    return cases


def _grpo_wrong(knobs: Knobs) -> Function:
    per_token = dispatched_wrong(knobs)

    def wrong(
        policy_log_probs: Tensor,
        response_mask: Tensor,
        gradient_accumulation_steps: int,
        loss_type: str,
        raw_rewards: Tensor,
        advantages: Tensor,
        old_log_probs: Tensor,
        cliprange: float,
    ) -> tuple[Tensor, dict[str, Any]]:
        loss, _ = per_token(policy_log_probs, loss_type, raw_rewards, advantages, old_log_probs, cliprange)
        total = averages.aggregate(loss, response_mask, "sequence", 1.0, knobs)
        return averages.micro_batch_step(total, gradient_accumulation_steps, policy_log_probs, knobs), {}

    return wrong


def _check_metadata(function: Any) -> Iterator[Bug]:
    """A property that finds no bug, as the handout leaves metadata open: notes which numbers of it move with positions
    where the mask is false."""
    case = next(c for c in _grpo_cases() if c.branch == "grpo_clip")
    mask, old = case.inputs["response_mask"], case.inputs["old_log_probs"]
    moved = [
        {**case.inputs, "old_log_probs": old.where(mask, other)} for other in (case.inputs["policy_log_probs"], old + 2)
    ]
    try:
        told = [_scalars(answer_parts(function(**fresh(i, "policy_log_probs")), ("loss", "metadata"))[1])
                for i in (case.inputs, *moved)]  # fmt: skip
    except Fault:
        return
    for name, value in told[0].items():
        if any(abs(value - other[name]) > 1e-5 * (1 + abs(value)) for other in told[1:] if name in other):
            function.notes.append(f"prompt or padding positions count in {name} of its metadata: is that meant?")
    yield from ()


def _scalars(metadata: Any) -> dict[str, float]:
    out = {}
    for name, value in metadata.items() if isinstance(metadata, dict) else ():
        if isinstance(value, Tensor) and value.numel() == 1:
            out[str(name)] = float(value.detach().double())
        elif isinstance(value, int | float):
            out[str(name)] = float(value)
    return {name: value for name, value in out.items() if value == value}


GRPO = Subject(
    "grpo_microbatch_train_step",
    "cs336_2025",
    (
        "policy_log_probs",
        "response_mask",
        "gradient_accumulation_steps",
        "loss_type",
        "raw_rewards",
        "advantages",
        "old_log_probs",
        "cliprange",
    ),
    cs336_2025.grpo_microbatch_train_step,
    _grpo_cases,
    observe_step,
    _grpo_wrong,
    {
        **step_knobs("mask", "rows", "batch", "accumulation", "loss_sign", "backward"),
        **{name: tokens.LOSS_KNOBS[name] for name in ("pick", "bounds", "ratio", "advantage", "weight", "method")},
    },
    _smaller_step,
    properties=(_check_metadata,),
    optional=frozenset({"grpo_no_clip"}),
)
MICRO_BATCH_STEPS = (SFT, GRPO)


NAME = "grpo_train_step"
PARAMETERS = (
    "model", "tokenizer", "optimizer", "gradient_accumulation_steps", "max_grad_norm", "reward_fn", "repeated_prompts",
    "rollout_responses", "repeated_ground_truths", "group_size", "baseline", "advantage_eps", "advantage_normalizer",
    "importance_reweighting_method", "old_log_probs", "cliprange", "loss_normalization", "normalization_constant",
)  # fmt: skip
PROMPTS = ("what is two plus three ?", "so four plus two is what ?", "seven minus one ?")
RESPONSES = (
    "five . <eos>", "six six six four plus two .", "two", "three plus three <eos>",
    "so four plus two is six . <eos>", ". <eos>", "six four two three five seven", "two plus",
    "so", "two two . . . . so what is it", "six five four . <eos>", "nine minus one seven so ?",
)  # fmt: skip


def reward(response: str, ground_truth: str) -> dict[str, float]:
    """A reward that depends on both texts and whose parts differ."""
    weight = sum((place + 1) * ord(letter) for place, letter in enumerate(f"{response}/{ground_truth}"))
    total = (weight % 9) / 4
    return {"reward": total, "format_reward": (weight % 5) / 4, "answer_reward": (weight % 7) / 8}


class _Reward:
    """The reward function, with what it says of itself."""

    told = "a reward for each pair of response and ground truth"

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []

    def __call__(self, response: str, ground_truth: str) -> dict[str, float]:
        self.asked.append((str(response), str(ground_truth)))
        return reward(response, ground_truth)


OPEN = "gradient_accumulation_steps=5, which does not divide the rows"  # a step may refuse it
SETTINGS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("defaults, one micro-batch", {"gradient_accumulation_steps": 1}),
    ("defaults, gradient_accumulation_steps=3", {"gradient_accumulation_steps": 3}),
    (OPEN, {"gradient_accumulation_steps": 5}),
    ("max_grad_norm=0.05", {"gradient_accumulation_steps": 2, "max_grad_norm": 0.05}),
    ("advantage_eps=0.5", {"gradient_accumulation_steps": 2, "advantage_eps": 0.5}),
    ("loss_normalization=constant", {"gradient_accumulation_steps": 3, "loss_normalization": "constant",
                                     "normalization_constant": 40, "advantage_normalizer": "none"}),
    ("baseline=none", {"gradient_accumulation_steps": 2, "baseline": "none", "advantage_normalizer": "none"}),
    ("advantage_normalizer=mean", {"gradient_accumulation_steps": 2, "advantage_normalizer": "mean",
                                   "advantage_eps": 0.1}),
    ("importance_reweighting_method=noclip", {"gradient_accumulation_steps": 2,
                                              "importance_reweighting_method": "noclip"}),
    ("importance_reweighting_method=grpo", {"gradient_accumulation_steps": 2, "importance_reweighting_method": "grpo",
                                            "cliprange": 0.1}),
    ("importance_reweighting_method=gspo", {"gradient_accumulation_steps": 2, "importance_reweighting_method": "gspo",
                                            "cliprange": 0.02}),
)  # fmt: skip


class Stage:
    """One call of the step on a fresh model, recorded."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.model, self.options = small_model(), options
        self.tokenizer = word_tokenizer()
        self.recorder = Recorder(self.model)
        self.optimizer = RecordedSGD(self.model, 0.5, self.recorder)
        self.updates: list[RecordedUpdate] = []
        self.recorder.on_step = self._step
        prompts = [p for p in PROMPTS for _ in range(4)]
        truths = [f"truth {p % 2}" for p in range(3) for _ in range(4)]  # two questions have the same answer
        self.reward = _Reward()
        self.texts = {
            "repeated_prompts": prompts,
            "rollout_responses": list(RESPONSES),
            "repeated_ground_truths": truths,
        }
        self.samples = [
            RecordedSample(
                i,
                i // 4,
                0,
                self.tokenizer.encode(p),
                self.tokenizer.encode(r),
                r,
                t,
                not r.endswith("<eos>"),
                reward(r, t)["reward"],
                reward(r, t),
            )
            for i, (p, r, t) in enumerate(zip(prompts, RESPONSES, truths, strict=True))
        ]
        self.width = max(len(s.token_ids) for s in self.samples)
        other = small_model(seed=1)
        with torch.no_grad(), self.recorder.pause():
            for s, row in zip(self.samples, self._old(other), strict=True):
                s.old = s.old_untempered = row[: len(s.token_ids)]

    def _old(self, other: Any) -> torch.Tensor:
        """Log-probabilities a little away from the model's own."""
        mine, theirs = (scored(m, self.samples, 1.0, self.width)[0] for m in (self.model, other))
        return mine + 0.3 * (theirs - mine).clamp(-2, 2)

    def arguments(self) -> dict[str, Any]:
        """What the step is called with."""
        out: dict[str, Any] = {
            "model": self.model,
            "tokenizer": self.tokenizer,
            "optimizer": self.optimizer,
            "max_grad_norm": 1e4,
            "reward_fn": self.reward,
            **{name: list(texts) for name, texts in self.texts.items()},
            "group_size": 4,
            **self.options,
        }
        if self.options.get("importance_reweighting_method", "none") != "none":
            full = max(len(s.ids) for s in self.samples) - 1
            old = torch.full((len(self.samples), full), -1.0)  # what stands outside the responses is not to be read
            for row, s in enumerate(self.samples):
                first = len(s.prompt_ids) - 1
                old[row, first : first + len(s.token_ids)] = s.old
            out["old_log_probs"] = old
        return out

    def objective(self) -> Options:
        """The objective that is asked for."""
        o = self.options
        return Options(
            method=o.get("importance_reweighting_method", "none"),
            baseline=o.get("baseline", "mean"),
            normalizer=o.get("advantage_normalizer", "std"),
            advantage_eps=o.get("advantage_eps", 1e-6),
            cliprange=o.get("cliprange", 0.2),
            length_norm=o.get("loss_normalization", "sequence"),
            constant=float(o.get("normalization_constant", 1)),
        )

    def _step(self) -> None:
        seen = seen_weights(self.recorder.forwards, self.samples, self.width, 1.0)
        self.update_from(seen, list(self.samples))

    def update_from(self, seen: dict[str, Any], samples: list[RecordedSample]) -> None:
        """Take in an optimizer step; rows that were not gone through have weight 0."""
        order = {s.number: i for i, s in enumerate(seen["samples"])}
        weights = None
        if seen["weights"] is not None:
            weights = torch.zeros(len(samples), self.width)
            for row, s in enumerate(samples):
                if s.number in order:
                    weights[row] = seen["weights"][order[s.number]]
        place = {s.number: i for i, s in enumerate(samples)}
        micro = [[place[seen["samples"][i].number] for i in rows] for rows in seen["micro"]]
        update = RecordedUpdate(
            self.objective(), samples, samples, micro, torch.zeros(0), len(samples), weights,
            self.options.get("gradient_accumulation_steps", 1), outside=seen["outside"],
            temperature_seen=seen["temperature_seen"],
            strangers=seen["strangers"], forwards=[f for f in self.recorder.forwards if f.backward],
        )  # fmt: skip
        update.label_shift, update.tokenizer = seen["label_shift"], self.tokenizer
        update.unseen = [s for s in samples if s.number not in order]
        with torch.enable_grad():
            update.log_probs = scored(self.model, samples, 1.0, self.width)[0].detach()
            limit = self.options.get("max_grad_norm", 1e4)
            with_gradients(update, self.model, limit, [torch.zeros_like(p) for p in self.model.parameters()])
        self.updates.append(update)


def problems(function: Yours) -> list[Bug]:
    """The bugs of the user's step, tried with one setting after the other; the first that shows any ends the trial.

    An error is shown where nothing else is found. `NotWrittenError` where each setting says that it is not written.
    """
    faults: list[Bug] = []
    unwritten = 0
    for about, options in SETTINGS:
        stage = Stage(options)
        try:
            answer = function(**stage.arguments())
            loss, metadata = answer_parts(answer, ("loss", "metadata"))
            value = tensor(loss, "the loss", scalar=True)
        except Fault as fault:
            unwritten += isinstance(fault, UnwrittenFault)
            if about == OPEN and not stage.updates:
                function.notes.append(f"not tried, as it refuses it: {about} ({fault.yours})")
            else:
                faults.append(Bug(NAME, *fault.kind, {"setting": about}, fault.yours, fault.ours))
            continue
        found = list(_after(stage, about, value, metadata))
        if found:
            return found
    if unwritten == len(SETTINGS):
        raise NotWrittenError
    return faults[:1]


def _after(stage: Stage, about: str, loss: torch.Tensor, metadata: Any) -> Iterator[Bug]:
    told = {"setting": about}
    if len(stage.updates) != 1:
        kind = f"the optimizer takes {len(stage.updates)} steps where one is asked for"
        yield Bug(NAME, kind, "the calls of optimizer.step()", told, f"{len(stage.updates)} steps", "1 step")
        return
    found = list(of_truths(NAME, stage.samples, stage.reward.asked, stage.texts["repeated_ground_truths"], told))
    if any(f.half for f in stage.updates[0].forwards):
        return
    found = found or judge.judged(NAME, stage.updates, about)
    yield from found
    if found:
        return
    left = [p.grad for p in stage.model.parameters() if p.grad is not None and bool(p.grad.any())]
    if left:
        where = "zero_grad after the step"
        yield Bug(NAME, "gradients are left behind after the step", where, told, "gradients", "none")
    right = _loss(stage.updates[0])
    if abs(float(loss) - right) > 1e-4 * (1 + abs(right)):
        kind = "the loss that is returned is not the batch's loss before the step"
        where = "what is added up over the micro-batches and returned"
        yield Bug(NAME, kind, where, told, f"loss {float(loss):.5g}", f"loss {right:.5g}")
    yield from _metadata(stage, about, metadata)


def _loss(update: RecordedUpdate) -> float:
    """The loss of the batch before the step, by our own functions."""
    o: Any = update.options  # its words are those that the functions take
    rewards = torch.tensor([s.reward for s in update.samples])
    a, _ = cs336_2026.compute_group_normalized_rewards(
        rewards,
        4,
        o.baseline,
        o.advantage_eps,
        o.normalizer,
    )
    loss, _ = cs336_2026.compute_policy_gradient_loss(
        a,
        update.log_probs,
        o.method,
        update.old(),
        o.cliprange,
        update.mask,
    )
    return float(cs336_2026.aggregate_loss_across_microbatch(loss, update.mask, o.length_norm, int(o.constant)))


def _metadata(stage: Stage, about: str, metadata: Any) -> Iterator[Bug]:
    """Entropies and clip fractions that are means over other places than response tokens."""
    for name, got, right in unlike(numbers(metadata), stage.updates[0], lenient=True):
        told = {"setting": about}
        yield Bug(NAME, *not_a_mean(name), told, f"{name} {short_text(got)}", f"{name} {short_text(right)}")


TRAIN_STEPS = (
    Subject(NAME, "cs336_2026", PARAMETERS, cs336_2026.grpo_train_step, list, lambda f, i: {}, properties=(problems,)),
)
