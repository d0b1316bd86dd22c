"""The train step of 2026, which is recorded and judged like a step of a loop."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from rlreason.courses import cs336_2025, cs336_2026
from rlreason.courses.check.calling import (
    Yours,
    answer_parts,
    small_model,
    tensor,
    word_tokenizer,
)
from rlreason.courses.check.functions import SUBJECTS
from rlreason.courses.check.loop_judge import findings_of_rewards, judged, not_a_mean, unlike
from rlreason.courses.check.loop_update import LoopOptions, RecordedSample, Recording, Update, scored
from rlreason.courses.check.subject import (
    Bug,
    Fault,
    NotWrittenError,
    Subject,
    UnwrittenFault,
    short_text,
    year_of,
)

NAME = "grpo_train_step"
PROMPTS = ("what is two plus three ?", "so four plus two is what ?", "seven minus one ?")
RESPONSES = (
    "five . <eos>", "six six six four plus two .", "two", "three plus three <eos>",
    "so four plus two is six . <eos>", ". <eos>", "six four two three five seven", "two plus",
    "so", "two two . . . . so what is it", "six five four . <eos>", "nine minus one seven so ?",
)  # fmt: skip


SETTINGS: tuple[dict[str, Any], ...] = (
    {"gradient_accumulation_steps": 1},
    {"gradient_accumulation_steps": 3},
    {"gradient_accumulation_steps": 5},  # does not divide the rows, which a step may refuse
    {"gradient_accumulation_steps": 2, "max_grad_norm": 0.05},
    {"gradient_accumulation_steps": 2, "advantage_eps": 0.5},
    {
        "gradient_accumulation_steps": 3,
        "loss_normalization": "constant",
        "normalization_constant": 40,
        "advantage_normalizer": "none",
    },
    {"gradient_accumulation_steps": 2, "baseline": "none", "advantage_normalizer": "none"},
    {"gradient_accumulation_steps": 2, "advantage_normalizer": "mean", "advantage_eps": 0.1},
    {"gradient_accumulation_steps": 2, "importance_reweighting_method": "noclip"},
    {"gradient_accumulation_steps": 2, "importance_reweighting_method": "grpo", "cliprange": 0.1},
    {"gradient_accumulation_steps": 2, "importance_reweighting_method": "gspo", "cliprange": 0.02},
)
OUTSIDE = -1.0  # the old log-probability outside the responses, where it must not be read


class Stage(Recording):
    """One call of the train step on a fresh model, recorded."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        options = LoopOptions(
            method=settings.get("importance_reweighting_method", "none"),
            baseline=settings.get("baseline", "mean"),
            normalizer=settings.get("advantage_normalizer", "std"),
            advantage_eps=settings.get("advantage_eps", 1e-6),
            cliprange=settings.get("cliprange", 0.2),
            length_norm=settings.get("loss_normalization", "sequence"),
            constant=float(settings.get("normalization_constant", 1)),
            max_grad_norm=settings.get("max_grad_norm", 1e4),
            old_outside=OUTSIDE,
        )
        super().__init__(word_tokenizer(), options, learning_rate=0.5)
        self.prompts = [p for p in PROMPTS for _ in range(4)]
        self.truths = [f"truth {p % 2}" for p in range(3) for _ in range(4)]  # two questions have the same answer
        for i, (prompt, response, truth) in enumerate(zip(self.prompts, RESPONSES, self.truths, strict=True)):
            prompt_ids, token_ids = self.tokenizer.encode(prompt), self.tokenizer.encode(response)
            truncated, parts = not response.endswith("<eos>"), self.reward(response, truth)
            self.samples.append(RecordedSample(i, i // 4, 0, prompt_ids, token_ids, response, truth, truncated, parts))
        mine, theirs = (scored(m, self.samples, 1.0) for m in (self.twin, small_model(seed=1)))
        for s, a, b in zip(self.samples, mine, theirs, strict=True):
            s.old = s.old_untempered = a + 0.3 * (b - a).clamp(-2, 2)  # a little away from the model's own

    def reward(self, text: str, truth: str) -> dict[str, float]:
        """Return a made-up reward that depends on both texts, with parts that differ from it."""
        weight = sum((place + 1) * ord(letter) for place, letter in enumerate(f"{text}/{truth}"))
        return {"reward": (weight % 9) / 4, "format_reward": (weight % 5) / 4, "answer_reward": (weight % 7) / 8}

    def arguments(self) -> dict[str, Any]:
        """Return the arguments that the step is called with."""
        out: dict[str, Any] = {
            "model": self.model,
            "tokenizer": self.tokenizer,
            "optimizer": self.optimizer,
            "max_grad_norm": 1e4,
            "reward_fn": self.reward_fn,
            "repeated_prompts": list(self.prompts),
            "rollout_responses": list(RESPONSES),
            "repeated_ground_truths": list(self.truths),
            "group_size": 4,
            **self.settings,
        }
        if self.options.method != "none":
            width = max(len(s.ids) for s in self.samples) - 1
            old = torch.full((len(self.samples), width), OUTSIDE)
            for row, s in enumerate(self.samples):
                first = len(s.prompt_ids) - 1
                old[row, first : first + len(s.token_ids)] = s.old
            out["old_log_probs"] = old
        return out

    def update(self) -> Update:
        """Return the update of a step; rows that no call of the model had are learned from with weight 0."""
        accumulation = self.settings["gradient_accumulation_steps"]
        update = Update(self, self.samples, len(self.samples), accumulation, before=self.gradient() * 0)
        update.unseen = [s for s in self.samples if s not in update.samples]
        update.samples = list(self.samples)
        return update


def _check_train_step(function: Yours) -> list[Bug]:
    """Return the bugs of a train step, from the first of `SETTINGS` that shows any; an error only if there is no other.

    `NotWrittenError` if it is not written for any setting.
    """
    faults: list[Bug] = []
    unwritten = 0
    for settings in SETTINGS:
        stage = Stage(settings)
        run = {"setting": ", ".join(f"{name}={value}" for name, value in settings.items())}
        try:
            answer = function(**stage.arguments())
            loss, metadata = answer_parts(answer, ("loss", "metadata"))
            value = tensor(loss, "the loss", scalar=True)
        except Fault as fault:
            unwritten += isinstance(fault, UnwrittenFault)
            if len(stage.samples) % settings["gradient_accumulation_steps"] and not stage.updates:
                function.notes.append(f"not tried, as it refuses it: {run['setting']} ({fault.yours})")
            else:
                faults.append(Bug(NAME, *fault.kind, run, fault.yours, fault.ours))
            continue
        if bugs := list(_bugs_of_stage(stage, run, value, metadata)):
            return bugs
    if unwritten == len(SETTINGS):
        raise NotWrittenError
    return faults[:1]


def _bugs_of_stage(stage: Stage, run: dict[str, str], loss: Tensor, metadata: Any) -> Iterator[Bug]:
    """Yield the bugs of a finished step: of its rewards and gradient, else of what it returns and leaves behind."""
    if len(stage.updates) != 1:
        kind = f"the optimizer takes {len(stage.updates)} steps where one is asked for"
        yield Bug(NAME, kind, "the calls of optimizer.step()", run, f"{len(stage.updates)} steps", "1 step")
        return
    (update,) = stage.updates
    if any(f.half for f in update.forwards):
        return
    findings = list(findings_of_rewards(stage.samples, stage.reward_calls, stage.truths)) or judged(stage.updates)
    if findings:
        yield from (finding.bug(NAME, run) for finding in findings)
        return
    if any(p.grad is not None and bool(p.grad.any()) for p in stage.model.parameters()):
        where = "zero_grad after the step"
        yield Bug(NAME, "gradients are left behind after the step", where, run, "gradients", "none")
    right = update.right_loss().item()
    if abs(float(loss) - right) > 1e-4 * (1 + abs(right)):
        kind = "the loss that is returned is not the batch's loss before the step"
        where = "what is added up over the micro-batches and returned"
        yield Bug(NAME, kind, where, run, f"loss {float(loss):.5g}", f"loss {right:.5g}")
    for name, yours, ours in unlike(metadata, update, lenient=True):
        yield Bug(NAME, *not_a_mean(name), run, f"{name} {short_text(yours)}", f"{name} {short_text(ours)}")


TRAIN_STEP = Subject(cs336_2026.grpo_train_step, list, properties=(_check_train_step,))
ALL_SUBJECTS = (*SUBJECTS, TRAIN_STEP)


def subject_of(name: str, function: Callable[..., Any], course: str) -> Subject:
    """Return the subject of a function: of the year that its parameters tell, else of this course."""
    year = cs336_2026 if (year_of(name, function) or course) == "cs336_2026" else cs336_2025
    same_name = [subject for subject in ALL_SUBJECTS if subject.name == name]
    return next((subject for subject in same_name if subject.ours is getattr(year, name, None)), same_name[0])
