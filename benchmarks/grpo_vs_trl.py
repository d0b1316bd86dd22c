"""GRPO against TRL's GRPOTrainer: seconds and memory of a step. `python benchmarks/grpo_vs_trl.py --data DIR`.

given      an optimizer step on 4 prompts with 8 given responses each, of 45-350 tokens of GSM8K's solutions
sampling   a step that samples the 4 x 8 responses itself, 64 tokens each

Both sides grade by the same number made from the token ids, so that every response has an advantage and none can be
left out; both clip the ratio at 0.2, divide by the group's standard deviation, keep metrics and every response of the
step on disk. `against_trl.py` says how the two are measured.

A row is valid when tokens are equal within 2% and, where responses are given, token ids are the same and the first
mean log-probability and entropy agree to 1e-4 in float32.
"""

import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from against_trl import BETAS, CLIPPED, TRL_RUN, Pair, Turns, compare_all, gsm8k, load, options, side_main

PROMPTS, SAMPLES, NEW_TOKENS, LENGTHS = 4, 8, 64, (45, 350)
RATE, EPS, CLIP = 1e-6, 1e-4, 0.2


def reward_of(ids: Sequence[int]) -> float:
    """In [0, 1), from the token ids alone.

    >>> reward_of([50, 48])
    0.010309278350515464
    """
    return sum(ids) % 97 / 97


def responses_from(own: Sequence[int], others: Sequence[Sequence[int]], lengths: Sequence[int]) -> list[list[int]]:
    """A different response for each length: the solution from another place on, then other problems' solutions.

    >>> responses_from([1, 2, 3, 4], [[5, 6], [7, 8]], [3, 6])
    [[1, 2, 3], [3, 4, 1, 2, 7, 8]]
    """
    found = []
    for number, length in enumerate(lengths):
        first = number * len(own) // len(lengths)
        rest = chain(*(others[(number + i) % len(others)] for i in range(len(others))))
        found.append([*own[first:], *own[:first], *rest][:length])
    return found


def prompts_of(given: Namespace) -> list[str]:
    """The four prompts as text."""
    from rlreason.config.leaves import prompt_renderer

    render = prompt_renderer("r1_zero.prompt")
    return [render(problem.question) for problem in gsm8k(given.data, PROMPTS)]


def given_pairs(given: Namespace, tokenizer: Any) -> list[list[Pair]]:
    """(prompt ids, response ids) of each response, prompt by prompt."""
    solutions = [tokenizer.encode(p.solution, add_special_tokens=False) for p in gsm8k(given.data, PROMPTS + 40)]
    random, groups = Random(0), []
    for number, prompt in enumerate(prompts_of(given)):
        lengths = [random.randint(*LENGTHS) for _ in range(SAMPLES)]
        others = solutions[PROMPTS + 10 * number : PROMPTS + 10 * (number + 1)]
        ids = tokenizer.encode(prompt)
        groups.append([(ids, response) for response in responses_from(solutions[number], others, lengths)])
    return groups


def ours(given: Namespace, turns: Turns) -> None:
    """Steps of rlreason: samples, rewards, advantages, the learner's update, the records."""
    import torch

    from rlreason.config.training import OptimizationConfig
    from rlreason.engines.rollouts import rollout_metrics
    from rlreason.model.policy import DTYPES, Policy
    from rlreason.objectives.objective import LossConfig, Objective
    from rlreason.records.files import ROLLOUTS
    from rlreason.records.writer import RunWriter
    from rlreason.training.algorithms import with_advantages
    from rlreason.training.learner import Learner
    from rlreason.types import Grade, Sample

    policy = Policy(*load(given.folder), DTYPES[given.dtypes[0]], torch.device("cpu"))
    objective = Objective(loss=LossConfig("grpo_clip", cliprange=CLIP), advantage_eps=EPS)
    optimization = OptimizationConfig(RATE, adam_betas=list(BETAS), **CLIPPED)
    learner = Learner(policy, objective, optimization, micro_batch_tokens=given.micro_batch_tokens)
    problems, sample = gsm8k(given.data, PROMPTS), sampler(given, policy)
    with tempfile.TemporaryDirectory() as folder:
        records = RunWriter(Path(folder) / "run", "", say=lambda line: None)
        turns.wait()
        for step in range(1, given.steps + 1):
            rewards = [(response, reward_of(response.token_ids)) for response in sample(step)]
            graded = [Sample(response, Grade(1.0, reward, reward, "wrong")) for response, reward in rewards]
            samples, _ = with_advantages(graded, objective)
            metrics = learner.update(samples)
            records.metrics({"train_step": step} | rollout_metrics(samples) | metrics)
            records.responses(ROLLOUTS, step, samples, problems)
            turns.stop()
            pairs = [(s.response.prompt_ids, s.response.token_ids) for s in samples]
            turns.done(pairs, metrics["train/log_prob"], metrics["train/entropy"], metrics["train/grad_norm"])


def sampler(given: Namespace, policy: Any) -> Callable[[int], list[Any]]:
    """Step number -> its 32 responses: those that are given, or new ones."""
    from rlreason.engines.base import Prompt, Sampling, seed_for
    from rlreason.engines.hf import HFEngine
    from rlreason.types import Response

    problems, texts = gsm8k(given.data, PROMPTS), prompts_of(given)
    if given.work == ["given"]:
        groups = given_pairs(given, policy.tokenizer)
        pairs = [(p.id, list(a), list(b)) for p, group in zip(problems, groups, strict=True) for a, b in group]
        fixed = [Response(name, prompt, ids, [], "", "stop") for name, prompt, ids in pairs]
        return lambda step: [replace(r, text=policy.tokenizer.decode(r.token_ids)) for r in fixed]
    engine = HFEngine(policy)
    sampling = Sampling(1.0, NEW_TOKENS, NEW_TOKENS)

    def sample(step: int) -> list[Response]:
        engine.load_weights(policy)
        prompts = [
            Prompt(p.id, policy.encode_prompt(text), seed_for(step, p.id))
            for p, text in zip(problems, texts, strict=True)
        ]
        return engine.generate(prompts, sampling, SAMPLES)

    return sample


def trl(given: Namespace, turns: Turns) -> None:
    """Steps of TRL's trainer, with nothing computed twice: on-policy it scores each response once, as rlreason does."""
    from datasets import Dataset, disable_progress_bars
    from trl import GRPOConfig, GRPOTrainer

    disable_progress_bars()
    model, tokenizer = load(given.folder)
    groups = dict(zip(prompts_of(given), given_pairs(given, tokenizer), strict=True))

    class Watched(GRPOTrainer):
        """Adds up the log-probabilities and entropies of a step, and reports it behind its records."""

        sums = (0.0, 0.0, 0.0)

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            self.seen = super()._generate_and_score_completions(inputs)
            self.sums = (0.0, 0.0, 0.0)
            return self.seen

        def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
            self.scores = super()._get_per_token_logps_and_entropies(*args, **kwargs)
            return self.scores

        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            loss, mask = super()._compute_loss(model, inputs), inputs["completion_mask"]
            if self.state.global_step == 0:
                added = [(score.detach() * mask).sum().item() for score in self.scores[:2]]
                self.sums = tuple(a + b for a, b in zip(self.sums, [*added, mask.sum().item()], strict=True))
            return loss

        def log(self, logs: dict[str, float], *args: Any) -> None:
            super().log(logs, *args)
            if "loss" in logs:  # the last call sums up the run
                turns.stop()
                log_prob, entropy, count = self.sums
                turns.done(real_pairs(self.seen), log_prob / (count or 1), entropy / (count or 1), logs["grad_norm"])

    with tempfile.TemporaryDirectory() as output:
        rows = Dataset.from_list([{"prompt": prompt} for prompt in groups])
        trainer = Watched(
            model,
            lambda completion_ids, **_: [reward_of(ids) for ids in completion_ids],
            args=GRPOConfig(output_dir=output, **trl_settings(given)),
            train_dataset=rows,
            processing_class=tokenizer,
            rollout_func=(lambda prompts, _: rollout(prompts, groups)) if given.work == ["given"] else None,
        )
        turns.wait()
        trainer.train()


def trl_settings(given: Namespace) -> dict[str, Any]:
    """TRL's settings for the agreed work."""
    micro = given.trl_micro_batch
    return TRL_RUN | {
        "max_steps": given.steps,
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": PROMPTS * SAMPLES // micro,
        "steps_per_generation": PROMPTS * SAMPLES // micro,
        "num_generations": SAMPLES,
        "max_completion_length": LENGTHS[1] if given.work == ["given"] else NEW_TOKENS,
        "generation_kwargs": None if given.work == ["given"] else {"min_new_tokens": NEW_TOKENS},
        "shuffle_dataset": False,
        "temperature": 1.0,
        "beta": 0.0,
        "loss_type": "grpo",
        "scale_rewards": "group",
        "epsilon": CLIP,
        "learning_rate": RATE,
        "bf16": given.dtypes == ["bfloat16"],
        "log_completions": True,
        "num_completions_to_print": 1,
    }


def rollout(prompts: Sequence[str], groups: dict[str, list[Pair]]) -> dict[str, Any]:
    """What TRL takes instead of sampling: the responses that are given to each prompt, in order.

    >>> rollout(["a", "a"], {"a": [([1], [2]), ([1], [3])]})["completion_ids"]
    [[2], [3]]
    """
    left = {prompt: iter(pairs) for prompt, pairs in groups.items()}
    pairs = [next(left[prompt]) for prompt in prompts]
    return {"prompt_ids": [list(p) for p, _ in pairs], "completion_ids": [list(r) for _, r in pairs], "logprobs": None}


def real_pairs(seen: dict[str, Any]) -> list[Pair]:
    """The sequences of TRL's padded step."""
    parts = []
    for kind in ("prompt", "completion"):
        masked = zip(seen[f"{kind}_ids"], seen[f"{kind}_mask"].bool(), strict=True)
        parts.append([ids[real].tolist() for ids, real in masked])
    return list(zip(*parts, strict=True))


def main() -> None:
    """One side's process, or the comparison of both."""
    given = options(__file__, __doc__ or "", ["given", "sampling"], steps=5)
    if given.side:
        side_main(given, {"rlreason": ours, "trl": trl})
        return
    if PROMPTS * SAMPLES % given.trl_micro_batch:
        sys.exit(f"--trl-micro-batch={given.trl_micro_batch} must divide {PROMPTS * SAMPLES}, the responses of a step")
    problems = gsm8k(given.data, 4000)
    compare_all(
        given,
        lambda: [*prompts_of(given), *(f"{p.question} {p.solution}" for p in problems)],
        lambda work: work == "given",
    )


if __name__ == "__main__":
    main()
