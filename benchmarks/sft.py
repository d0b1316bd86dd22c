"""SFT against TRL's SFTTrainer: loss, processor seconds, memory. `python benchmarks/sft.py --model DIR --data DIR`.

Both learn the same GSM8K solutions in r1_zero form, in the same batches, from the same weights, with the same
optimizer. Each works in a process of its own, and they take their steps in turn, so that other programs slow both
alike. The pairs of a step are in order of length, which saves TRL most of its padding.

A result is valid when both saw the same token ids and, in float32, their first losses agree to 1e-4.
"""

import argparse
import contextlib
import hashlib
import importlib.util
import multiprocessing
import os
import resource
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from rlreason.algorithms.sft import SFT, sft_sample  # noqa: E402
from rlreason.config.optimization import OptimizationConfig  # noqa: E402
from rlreason.data.files import file_rows, read_table  # noqa: E402
from rlreason.data.prompts import load_template, render  # noqa: E402
from rlreason.data.rows import field_names, to_problem  # noqa: E402
from rlreason.data.traces import trace_text  # noqa: E402
from rlreason.learner import Learner  # noqa: E402
from rlreason.model.packing import PackedBatch  # noqa: E402
from rlreason.model.policy import DTYPES, Policy  # noqa: E402
from rlreason.model.tiny import build_model, build_tokenizer  # noqa: E402
from rlreason.objectives.objective import LengthNormConfig, Objective  # noqa: E402
from rlreason.types import Sample  # noqa: E402

TRACE = " {solution} </think> <answer>{answer}</answer>"
BETAS = (0.9, 0.95)
SAME: dict[str, Any] = {
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
}  # with decay, TRL alone excepts biases and norms
Seen = tuple[list[int], int]  # token ids of a prompt and its response, how many of them are learned


@dataclass(frozen=True)
class Step:
    """What one side did in one optimizer step."""

    loss: float
    grad_norm: float
    seconds: float  # of the processor
    seen: list[Seen]
    positions: int  # that went through the layers, padding included
    peak: float  # GB of memory so far


@dataclass
class Turns:
    """One side's end of the pipe: waits for its turn, and reports what its step saw and cost."""

    pipe: Connection
    left: int

    def wait(self) -> None:
        """Wait for the turn, and start the clock of a step."""
        self.pipe.recv()
        self.batches: list[Callable[[], list[Seen]]] = []  # called when the clock has stopped
        self.positions = 0
        self.begin = time.process_time()

    def saw(self, batch: Callable[[], list[Seen]], positions: int) -> None:
        """Record a batch that went through the model."""
        self.batches.append(batch)
        self.positions += positions

    def done(self, loss: float, grad_norm: float) -> None:
        """Stop the clock, report the step, and wait for the next turn."""
        seconds = time.process_time() - self.begin
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6  # Linux counts in kB
        seen = [sequence for batch in self.batches for sequence in batch()]
        self.pipe.send(Step(loss, grad_norm, seconds, seen, self.positions, peak))
        self.left -= 1
        if self.left:
            self.wait()


def load(folder: str) -> tuple[Any, Any]:
    """(model, tokenizer) of a model folder, in float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    return model, AutoTokenizer.from_pretrained(folder)


class WatchedPolicy(Policy):
    """Records the token ids of every batch that is scored for learning."""

    turns: Turns | None = None

    def log_probs(self, batch: PackedBatch, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.turns is not None:
            self.turns.saw(partial(unpacked, batch), batch.input_ids.numel())
        return super().log_probs(batch, *args, **kwargs)


def unpacked(batch: PackedBatch) -> list[Seen]:
    """The sequences of a packed batch."""
    inputs = batch.input_ids[0].split(batch.bounds.diff().tolist())  # without the last token of each sequence
    learned = batch.labels.split(batch.lengths.tolist())
    return [([*ids.tolist(), int(y[-1])], len(y)) for ids, y in zip(inputs, learned, strict=True)]


def ours(folder: str, batches: list[list[Sample]], given: Namespace, turns: Turns) -> None:
    """Train with rlreason's learner, a step per turn."""
    policy = WatchedPolicy(*load(folder), DTYPES[given.dtype], torch.device("cpu"))
    policy.turns = turns
    micro, objective = given.micro_batch_tokens, Objective(length_norm=LengthNormConfig("token"))
    optimization = OptimizationConfig(given.learning_rate, adam_betas=list(BETAS), **SAME)
    learner = Learner(policy, objective, optimization, micro_batch_tokens=micro)
    turns.wait()
    for batch in batches:
        metrics = learner.update(batch)
        turns.done(metrics["train/loss"], metrics["train/grad_norm"])


def trl(folder: str, batches: list[list[Sample]], given: Namespace, turns: Turns, padding_free: bool) -> None:
    """Train with TRL's trainer with its fastest settings: no activation is computed twice, its optimizer is fused."""
    from datasets import Dataset, disable_progress_bars
    from trl import SFTConfig, SFTTrainer

    disable_progress_bars()

    class Watched(SFTTrainer):
        def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            turns.saw(partial(unpadded, dict(inputs)), inputs["input_ids"].numel())
            return super().compute_loss(model, inputs, *args, **kwargs)

        def log(self, logs: dict[str, float], *args: Any) -> None:
            if "loss" in logs:  # the last call sums up the run
                turns.done(logs["loss"], logs["grad_norm"])

    pairs = [(s.response.prompt_ids, s.response.token_ids) for batch in batches for s in batch]
    rows = [{"input_ids": [*p, *r], "completion_mask": [0] * len(p) + [1] * len(r)} for p, r in pairs]
    model, tokenizer = load(folder)
    with tempfile.TemporaryDirectory() as output:
        settings = SFTConfig(
            output_dir=output,
            max_steps=given.steps,
            per_device_train_batch_size=given.micro_batch,
            gradient_accumulation_steps=given.batch // given.micro_batch,
            train_sampling_strategy="sequential",
            completion_only_loss=True,
            padding_free=padding_free,
            max_length=None,
            learning_rate=given.learning_rate,
            lr_scheduler_type="constant",
            adam_beta1=BETAS[0],
            adam_beta2=BETAS[1],
            bf16=given.dtype == "bfloat16",
            gradient_checkpointing=False,
            use_cpu=True,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **SAME,
        )
        trainer = Watched(model, settings, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
        turns.wait()
        trainer.train()


def unpadded(inputs: dict[str, Any]) -> list[Seen]:
    """The sequences of a batch of TRL's."""
    ids, labels = inputs["input_ids"], inputs["labels"]
    if "attention_mask" in inputs:
        masks = inputs["attention_mask"].bool()
        parts = [(i[real], y[real]) for i, y, real in zip(ids, labels, masks, strict=True)]
    else:
        sizes = inputs["cu_seq_lens_q"].diff().tolist()
        parts = list(zip(ids[0].split(sizes), labels[0].split(sizes), strict=True))
    return [(i.tolist(), int((y != -100).sum())) for i, y in parts]


def serve(name: str, folder: str, batches: list[list[Sample]], given: Namespace, pipe: Connection) -> None:
    """One side, in its own process."""
    torch.set_num_threads(given.threads)
    turns = Turns(pipe, len(batches))
    with contextlib.suppress(EOFError):  # the other side has failed
        if name == "rlreason":
            ours(folder, batches, given, turns)
        else:
            trl(folder, batches, given, turns, padding_free=name == "padding_free")


def run_in_turn(names: Sequence[str], folder: str, batches: Any, given: Namespace) -> dict[str, list[Step]]:
    """Every side's steps. Which side goes first changes from step to step."""
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, Any] = {}
    for name in names:
        pipes[name], far = context.Pipe()
        context.Process(target=serve, args=(name, folder, batches, given, far), daemon=True).start()
        far.close()  # so that a side which fails ends the run
    steps: dict[str, list[Step]] = {name: [] for name in names}
    for number in range(len(batches)):
        first = number % len(names)
        for name in [*names[first:], *names[:first]]:
            try:
                pipes[name].send("your turn")
                steps[name].append(pipes[name].recv())
            except (EOFError, OSError):
                sys.exit(f"{name} ended before it had done step {number + 1}: its error stands above")
    return steps


def gsm8k(folder: Path, count: int) -> list[tuple[str, str]]:
    """The first (prompt, response) pairs, as text."""
    parse = partial(to_problem, names=field_names({}), gold="auto", max_chars=100_000, wrap=False)
    table = read_table(file_rows(folder / "train.jsonl"), "train.jsonl", "train", parse, lambda row: None, skip=False)
    template = load_template("r1_zero.prompt", ROOT / "prompts")
    return [(render(template, p.question), trace_text(p, TRACE)) for p in table.problems[:count]]


def make_tiny(folder: str, texts: list[tuple[str, str]]) -> None:
    """A model of 5 M parameters with random weights."""
    tokenizer = build_tokenizer((prompt + response for prompt, response in texts), vocab_size=8192)
    tokenizer.save_pretrained(folder)
    build_model(len(tokenizer), width=256, layers=4).save_pretrained(folder)


def in_batches(texts: list[tuple[str, str]], tokenizer: Any, given: Namespace) -> list[list[Sample]]:
    """The batch of every step, its pairs in order of length."""
    traces = []
    for prompt, response in texts:
        ids = [*tokenizer.encode(response, add_special_tokens=False), tokenizer.eos_token_id]
        traces.append(sft_sample(tokenizer.encode(prompt), ids, response))
    algorithm = SFT(traces, given.batch, given.seed, given.steps)
    batches = [algorithm.collect(step).batches[0] for step in range(1, given.steps + 1)]
    return [sorted(batch, key=lambda s: len(s.response.prompt_ids) + len(s.response.token_ids)) for batch in batches]


def count_tokens(steps: Sequence[Step]) -> int:
    """Tokens that the model saw, without padding."""
    return sum(len(ids) for step in steps for ids, _ in step.seen)


def digest(steps: Sequence[Step]) -> str:
    """16 hex digits from the token ids of every step; their order within a step does not matter."""
    return hashlib.sha256(repr([sorted(step.seen) for step in steps]).encode()).hexdigest()[:16]


def compare(name: str, mine: list[Step], theirs: list[Step], exact: bool) -> bool:
    """Print the tables; whether the results are valid. The time of the first step, a warm-up, is left out."""
    print(f"\n{'step':>5}{'tokens':>8}{'loss':>11}{'TRL':>11}{'differs':>11}{'seconds':>10}{'TRL':>8}{'ratio':>7}")
    for number, (a, b) in enumerate(zip(mine, theirs, strict=True), 1):
        row = f"{number:>5}{count_tokens([a]):>8}{a.loss:>11.6f}{b.loss:>11.6f}{a.loss / b.loss - 1:>+11.5%}"
        print(row + f"{a.seconds:>10.2f}{b.seconds:>8.2f}" + (f"{a.seconds / b.seconds:>7.2f}" if number > 1 else ""))
    print(f"\n{'':<20}{'seconds per step':>18}{'tokens per s':>14}{'positions per token':>21}{'peak GB':>9}")
    for side, steps in (("rlreason", mine), (f"TRL {name}", theirs)):
        seconds, tokens = sum(s.seconds for s in steps[1:]), count_tokens(steps[1:])
        row = f"{seconds / (len(steps) - 1):>18.2f}{tokens / seconds:>14.0f}"
        print(f"{side:<20}{row}{sum(s.positions for s in steps[1:]) / tokens:>21.2f}{steps[-1].peak:>9.2f}")
    ratio = statistics.median(a.seconds / b.seconds for a, b in zip(mine[1:], theirs[1:], strict=True))
    worst = max(abs(a.loss / b.loss - 1) for a, b in zip(mine, theirs, strict=True))
    first, hashes = abs(mine[0].loss - theirs[0].loss), (digest(mine), digest(theirs))
    print(f"processor seconds, rlreason / TRL {name}: {ratio:.2f} (median of the steps)")
    print(f"losses differ by at most {worst:.4%} (goal: 1%), the first by {first:.1e} (goal in float32: 1e-4)")
    print(
        f"first gradient norm {mine[0].grad_norm:.5f}, TRL {theirs[0].grad_norm:.5f}; token ids {' and '.join(hashes)}"
    )
    valid = hashes[0] == hashes[1] and (first <= 1e-4 or not exact)
    print("these results are valid" if valid else "THESE RESULTS ARE NOT VALID: the two did other work")
    return valid


def options() -> Namespace:
    """The command line; exits with a line where it is wrong or TRL is missing."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--model", required=True, help="a model folder, or tiny: 5 M random parameters")
    add("--data", required=True, type=Path, help="GSM8K: a folder with train.jsonl")
    add("--pairs", type=int, default=64)
    add("--batch", type=int, default=16, help="pairs per optimizer step")
    add("--steps", type=int, default=5, help="the first warms up")
    add("--dtype", choices=list(DTYPES), default="float32", help="of matrix products")
    add("--threads", type=int, default=1)
    add("--peer", choices=["padded", "padding_free", "both"], default="padded")
    add("--micro-batch", type=int, default=1, help="TRL's sequences at a time; on one processor core 1 is its fastest")
    add("--micro-batch-tokens", type=int, default=8192, help="rlreason's tokens at a time")
    add("--learning-rate", type=float, default=2e-5)
    add("--seed", type=int, default=0, help="of the order of the pairs")
    given = parser.parse_args()
    if importlib.util.find_spec("trl") is None:
        sys.exit("benchmarks/sft.py compares with TRL, which is not installed: pip install trl")
    if given.batch % given.micro_batch or given.steps < 2:
        sys.exit(f"--batch={given.batch} must be a multiple of --micro-batch, and --steps={given.steps} at least 2")
    return given


def main() -> None:
    """Run both sides on the same batches, and print their losses, times and memory."""
    given = options()
    os.environ |= {"OMP_NUM_THREADS": str(given.threads), "CUDA_VISIBLE_DEVICES": ""}
    peers = ["padded", "padding_free"] if given.peer == "both" else [given.peer]
    texts = gsm8k(given.data, given.pairs)
    with tempfile.TemporaryDirectory() as tiny:
        folder = tiny if given.model == "tiny" else given.model
        if folder == tiny:
            make_tiny(tiny, gsm8k(given.data, 4000))
        batches = in_batches(texts, AutoTokenizer.from_pretrained(folder), given)
        packages = ", ".join(f"{name} {version(name)}" for name in ("trl", "transformers", "torch"))
        print(f"{given.model}, {given.dtype}, threads: {given.threads}; {packages}")
        print(f"{len(texts)} pairs, {given.batch} a step; AdamW at {given.learning_rate:g}, clipped at norm 1")
        print(f"at a time: rlreason {given.micro_batch_tokens} tokens, TRL {given.micro_batch} sequences")
        print("All seconds are processor seconds of a side's own process; the sides take their steps in turn.")
        steps = run_in_turn(["rlreason", *peers], folder, batches, given)
    valid = [compare(name, steps["rlreason"], steps[name], given.dtype == "float32") for name in peers]
    sys.exit(0 if all(valid) else 1)


if __name__ == "__main__":
    main()
