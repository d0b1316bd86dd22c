"""SFT against TRL's SFTTrainer: processor seconds and memory of a step. `python benchmarks/sft_vs_trl.py --data DIR`.

sft        an optimizer step on 16 solutions of GSM8K in r1_zero form, other ones in each step

The pairs of a step are in order of length, which saves TRL's padding where it takes several at a time.
`against_trl.py` says how the two are measured. A row is valid when token ids are the same and, in float32, the first
mean log-probability (the loss without its sign) and the first mean entropy agree to 1e-4.
"""

import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from against_trl import BETAS, CLIPPED, TRL_RUN, Pair, Turns, compare_all, gsm8k, load, options, side_main

PAIRS = 16  # of a step
TRACE = " {solution} </think> <answer>{answer}</answer>"
RATE = 2e-5


def texts_of(given: Namespace, count: int) -> list[tuple[str, str]]:
    """The first (prompt, response) pairs, as text."""
    from rlreason.config.leaves import prompt_renderer

    render = prompt_renderer("r1_zero.prompt")
    problems = gsm8k(given.data, count)
    return [(render(p.question), TRACE.format(solution=p.solution, answer=p.answer)) for p in problems]


def batches_of(given: Namespace, tokenizer: Any) -> list[list[Pair]]:
    """The token ids of every step's pairs, in order of length."""
    pairs = [
        (tokenizer.encode(prompt), [*tokenizer.encode(response, add_special_tokens=False), tokenizer.eos_token_id])
        for prompt, response in texts_of(given, PAIRS * given.steps)
    ]
    return [sorted(pairs[i : i + PAIRS], key=length) for i in range(0, len(pairs), PAIRS)]


def length(pair: Pair) -> int:
    """Tokens of a prompt and its response."""
    return len(pair[0]) + len(pair[1])


def ours(given: Namespace, turns: Turns) -> None:
    """Steps of rlreason: the learner's update, and its metrics on disk."""
    import torch

    from rlreason.config.training import OptimizationConfig
    from rlreason.model.policy import DTYPES, Policy
    from rlreason.objectives.objective import LengthNormConfig, Objective
    from rlreason.records.writer import RunWriter
    from rlreason.training.algorithms import sft_sample
    from rlreason.training.learner import Learner

    policy = Policy(*load(given.folder), DTYPES[given.dtypes[0]], torch.device("cpu"))
    optimization = OptimizationConfig(RATE, adam_betas=list(BETAS), **CLIPPED)
    objective = Objective(length_norm=LengthNormConfig("token"))
    learner = Learner(policy, objective, optimization, micro_batch_tokens=given.micro_batch_tokens)
    batches = batches_of(given, policy.tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        records = RunWriter(Path(folder) / "run", "", say=lambda line: None)
        turns.wait()
        for step, batch in enumerate(batches, 1):
            metrics = learner.update([sft_sample(list(p), list(r), "", f"train-{i}") for i, (p, r) in enumerate(batch)])
            records.metrics({"train_step": step} | metrics)
            turns.stop()
            turns.done(batch, metrics["train/log_prob"], metrics["train/entropy"], metrics["train/grad_norm"])


def trl(given: Namespace, turns: Turns) -> None:
    """Steps of TRL's trainer."""
    from datasets import Dataset, disable_progress_bars
    from trl import SFTConfig, SFTTrainer

    disable_progress_bars()
    model, tokenizer = load(given.folder)
    batches = batches_of(given, tokenizer)

    class Watched(SFTTrainer):
        """Keeps what went through the model, and weighs each batch's entropy by its tokens."""

        def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            seen.append(dict(inputs))
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            count = int((seen[-1]["labels"] != -100).sum())
            weighed.append((self._metrics["train"]["entropy"][-1] * count, count))
            return loss

        def log(self, logs: dict[str, float], *args: Any) -> None:
            super().log(logs, *args)
            if "loss" in logs:  # the last call sums up the run
                turns.stop()
                entropy, count = (sum(column) for column in zip(*weighed, strict=True))
                pairs = [pair for batch in seen for pair in real_pairs(batch)]
                seen.clear()
                weighed.clear()
                turns.done(pairs, -logs["loss"], entropy / count, logs["grad_norm"])

    seen: list[dict[str, Any]] = []
    weighed: list[tuple[float, int]] = []
    rows = [{"input_ids": [*p, *r], "completion_mask": [0] * len(p) + [1] * len(r)} for b in batches for p, r in b]
    with tempfile.TemporaryDirectory() as output:
        settings = TRL_RUN | {
            "max_steps": given.steps,
            "per_device_train_batch_size": given.trl_micro_batch,
            "gradient_accumulation_steps": PAIRS // given.trl_micro_batch,
            "train_sampling_strategy": "sequential",
            "completion_only_loss": True,
            "max_length": None,
            "learning_rate": RATE,
            "bf16": given.dtypes == ["bfloat16"],
        }
        config = SFTConfig(output_dir=output, **settings)
        trainer = Watched(model, config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
        turns.wait()
        trainer.train()


def real_pairs(inputs: dict[str, Any]) -> list[Pair]:
    """The sequences of a padded batch of TRL's, cut where the response begins."""
    pairs = []
    for ids, labels, mask in zip(inputs["input_ids"], inputs["labels"], inputs["attention_mask"], strict=True):
        real, learned = ids[mask.bool()].tolist(), int((labels != -100).sum())
        pairs.append((real[:-learned], real[-learned:]))
    return pairs


def main() -> None:
    """One side's process, or the comparison of both."""
    given = options(__file__, __doc__ or "", ["sft"], steps=5)
    if given.side:
        side_main(given, {"rlreason": ours, "trl": trl})
        return
    if PAIRS % given.trl_micro_batch:
        sys.exit(f"--trl-micro-batch={given.trl_micro_batch} must divide {PAIRS}, the pairs of a step")
    compare_all(given, lambda: map("".join, texts_of(given, 4000)), lambda work: True)


if __name__ == "__main__":
    main()
