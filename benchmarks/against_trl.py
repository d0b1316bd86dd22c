"""What the comparisons with TRL share: TRL in a folder of its own, the models, the two sides' turns, the table.

Each side works in a process of its own, pinned to one processor core with one thread, and only TRL's process sees
TRL. The sides take their steps in turn, so that other programs slow both alike. All seconds are processor seconds of
that process over a whole step: what is learned from, the update, the metrics and the records of the step. Memory is
the most that the process held during its steps above what it held before the first, model and libraries loaded.
"""

import argparse
import hashlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

TRL = "trl==1.16.*"
#: Beside TRL, without what an environment of rlreason has anyway: torch and transformers are the same on both sides.
WITH_TRL = ["accelerate", "datasets", "dill<0.4.2", "multiprocess<0.70.20", "pandas", "psutil", "pyarrow", "xxhash"]
SIDES = ("rlreason", "trl")
BETAS = (0.9, 0.95)
CLIPPED: dict[str, Any] = {"weight_decay": 0.0, "max_grad_norm": 1.0}  # with decay, TRL alone excepts biases and norms
TRL_RUN: dict[str, Any] = {  # what every trainer of TRL's is told: nothing computed twice, nothing saved, all logged
    "lr_scheduler_type": "constant",
    "adam_beta1": BETAS[0],
    "adam_beta2": BETAS[1],
    "gradient_checkpointing": False,
    "use_cpu": True,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    **CLIPPED,
}
CLOSE = 1e-4  # of a first mean in float32
SAME_TOKENS = 0.02
Pair = tuple[Sequence[int], Sequence[int]]  # token ids of a prompt and of its response


@dataclass(frozen=True)
class Step:
    """What one side did in one optimizer step. The means are over its response tokens, before the weights moved."""

    seconds: float  # of the processor
    memory: float  # MB above the start, so far
    tokens: int  # of the sequences that were learned from, a prompt counted with each of its responses
    digest: str  # of their ids
    log_prob: float
    entropy: float | None  # nats; None: not measured alike on both sides
    grad_norm: float


class Turns:
    """One side's end of the line to the program that compares: waits for its turn, reports what its step cost."""

    def __init__(self, reply: int) -> None:
        self._reply = os.fdopen(reply, "w")
        self._start = 0.0

    def wait(self) -> None:
        """Wait for the turn and start the clock of a step; ends the process when there is none."""
        if not sys.stdin.readline():
            os._exit(0)  # from within a training loop
        if not self._start:
            Path("/proc/self/clear_refs").write_text("5")  # the peak is that of now
            self._start = resident("VmRSS")
        self._begin = time.process_time()

    def stop(self) -> None:
        """Stop the clock: what follows is the benchmark's own."""
        self._seconds = time.process_time() - self._begin

    def done(self, pairs: Sequence[Pair], log_prob: float, entropy: float | None, grad_norm: float) -> None:
        """Report the step, and wait for the next turn."""
        tokens = sum(len(prompt) + len(response) for prompt, response in pairs)
        memory = resident("VmHWM") - self._start
        step = Step(self._seconds, memory, tokens, digest(pairs), log_prob, entropy, grad_norm)
        print(json.dumps(asdict(step)), file=self._reply, flush=True)
        self.wait()


def resident(name: str) -> float:
    """MB that this process holds in memory (`VmRSS`), or has held at most (`VmHWM`)."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024


def digest(pairs: Iterable[Pair]) -> str:
    """16 hex digits from the token ids of every sequence, in any order.

    >>> digest([([1], [2, 3]), ([4], [5])]) == digest([([4], [5]), ([1], [2, 3])])
    True
    """
    return hashlib.sha256(repr(sorted((list(p), list(r)) for p, r in pairs)).encode()).hexdigest()[:16]


def install(folder: Path) -> None:
    """TRL and what it needs beside transformers, into a folder that nothing else imports from.

    dill, which datasets pickles with, takes modules for libraries only where their path has `site-packages` in it.
    """
    if any(folder.glob("trl-*.dist-info")):
        return
    print(f"installing {TRL} into {folder}", flush=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), TRL, *WITH_TRL]
    if subprocess.run(pip, check=False).returncode:
        sys.exit(f"--trl-folder={folder}: pip could not install {TRL} there: its error stands above")


def save_small(folder: Path, texts: Iterable[str]) -> None:
    """A Qwen2 of 5 M parameters, always with the same random weights, and a tokenizer of 4,096 tokens for it."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from rlreason.model.parameters import build_tokenizer

    tokenizer = build_tokenizer(texts, vocab_size=4096)
    torch.manual_seed(0)
    shape = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 5}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    Qwen2ForCausalLM(Qwen2Config(vocab_size=len(tokenizer), **shape, **heads, **ends)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def load(folder: str) -> tuple[Any, Any]:
    """(model in float32, tokenizer) of a model folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    return model, AutoTokenizer.from_pretrained(folder)


def gsm8k(folder: Path, count: int) -> list[Any]:
    """The first problems of GSM8K's training set, each with its solution (without the calculator's notes)."""
    from rlreason.types import Problem

    lines = (folder / "train.jsonl").read_text(encoding="utf-8").splitlines()[:count]
    problems = []
    for number, row in enumerate(map(json.loads, lines)):
        solution, answer = re.sub("<<.*?>>", "", row["answer"]).split("\n#### ")
        problems.append(Problem(f"train-{number}", row["question"], answer, solution))
    return problems


def options(script: str, doc: str, works: Sequence[str], steps: int) -> Namespace:
    """The command line of a comparison; ends with one line where it is wrong."""
    parser = argparse.ArgumentParser(description=doc.partition("\n")[0])
    add = parser.add_argument
    add("--data", required=True, type=Path, help="GSM8K: a folder with train.jsonl")
    add("--model", help="a model folder, such as SmolLM2-135M's, to measure beside the 5 M Qwen2 made on the spot")
    add("--work", nargs="+", choices=works, default=list(works))
    add("--sizes", nargs="+", choices=["5m", "model"], help="left out: both where --model is given")
    add("--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"], help="of products")
    add("--steps", type=int, default=steps, help="the first warms up and does not count")
    add("--micro-batch-tokens", type=int, default=2048, help="rlreason's tokens at a time")
    add("--trl-micro-batch", type=int, default=1, help="TRL's sequences at a time")
    add("--trl-folder", type=Path, default=Path.home() / ".cache/rlreason/trl", help="TRL is installed there")
    add("--json", type=Path, help="rows are kept there; one that it holds is not measured again")
    add("--core", type=int, default=max(os.sched_getaffinity(0)), help="the processor core of both sides")
    add("--side", choices=SIDES, help=argparse.SUPPRESS)  # the rest is how a side is started
    for name in ("--folder", "--reply"):
        add(name, help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.sizes = given.sizes or ["5m", *["model"] * bool(given.model)]
    if "model" in given.sizes and not given.model:
        sys.exit("--sizes=model needs a model: give its folder by --model, or leave the size out")
    if given.steps < 2:
        sys.exit(f"--steps={given.steps} must be at least 2: the first warms up")
    if not (given.data / "train.jsonl").is_file():
        sys.exit(f"--data={given.data} holds no train.jsonl: give a folder with GSM8K's")
    given.script, given.trl_folder = script, given.trl_folder / "site-packages"
    return given


def side_main(given: Namespace, sides: dict[str, Callable[[Namespace, Turns], None]]) -> None:
    """The whole of a side's own process."""
    os.sched_setaffinity(0, {given.core})
    import torch

    torch.set_num_threads(1)
    sides[given.side](given, Turns(int(given.reply)))


def compare_all(given: Namespace, texts: Callable[[], Iterable[str]], exact: Callable[[str], bool]) -> None:
    """Measure every row that is asked for, print the table, and exit with 1 where a row is not valid.

    `texts`: what the small model's tokenizer is made from. `exact`: whether both sides of a work see the same tokens.
    """
    install(given.trl_folder)
    kept: dict[str, Any] = {}
    if given.json and given.json.exists():
        kept = json.loads(given.json.read_text(encoding="utf-8"))["rows"]
    rows = {}
    with tempfile.TemporaryDirectory() as small, tempfile.TemporaryDirectory() as logs:
        given.logs = Path(logs)
        if "5m" in given.sizes:
            save_small(Path(small), texts())
        for key in ((w, s, d) for w in given.work for s in given.sizes for d in given.dtypes):
            work, size, dtype = key
            name = f"{work} {size if size == '5m' else Path(given.model).name} {dtype}"
            if name not in kept:
                steps = in_turn(given, work, small if size == "5m" else given.model, dtype)
                kept[name] = summed_up(steps["rlreason"], steps["trl"], exact(work), dtype == "float32")
                keep(given, kept)
            rows[name] = kept[name]
            print(f"{name}: {sentence(rows[name])}", flush=True)
    print("\n" + table(rows))
    sys.exit(0 if all(row["valid"] for row in rows.values()) else 1)


def keep(given: Namespace, rows: dict[str, Any]) -> None:
    """Write the rows that there are, with the versions and settings that made them, if a file is named."""
    if given.json is None:
        return
    found = next(given.trl_folder.glob("trl-*.dist-info")).name.removeprefix("trl-").removesuffix(".dist-info")
    versions = {"trl": found} | {name: version(name) for name in ("transformers", "torch")}
    settings = {name: getattr(given, name) for name in ("steps", "micro_batch_tokens", "trl_micro_batch")}
    given.json.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"versions": versions, "settings": settings, "rows": rows}, indent=1)
    given.json.write_text(text + "\n", encoding="utf-8")


def in_turn(given: Namespace, work: str, folder: str, dtype: str) -> dict[str, list[Step]]:
    """Every side's steps. Which side goes first changes from step to step."""
    steps: dict[str, list[Step]] = {side: [] for side in SIDES}
    with ExitStack() as stack:
        lines = {side: started(stack, given, side, work, folder, dtype) for side in SIDES}
        for number in range(given.steps):
            for side in SIDES[:: 1 if number % 2 else -1]:
                turn, reply = lines[side]
                try:
                    print("your turn", file=turn, flush=True)
                    line = reply.readline()
                except BrokenPipeError:
                    line = ""
                if not line:
                    said = (given.logs / f"{side}.log").read_text(encoding="utf-8")[-2000:]
                    sys.exit(f"{said}\n{side} ended before it had done step {number + 1} of {work}")
                steps[side].append(Step(**json.loads(line)))
            newest = ", ".join(f"{side} {steps[side][-1].seconds:.2f} s" for side in SIDES)
            print(f"  {work} {dtype}, step {number + 1}: {newest}", flush=True)
    return steps


def started(
    stack: ExitStack, given: Namespace, side: str, work: str, folder: str, dtype: str
) -> tuple[IO[str], IO[str]]:
    """(where a side gets its turns, where it reports its steps): of a new process."""
    near, far = os.pipe()
    words = {
        "--side": side,
        "--work": work,
        "--dtypes": dtype,
        "--folder": folder,
        "--reply": far,
        "--core": given.core,
    }
    words |= {"--data": given.data, "--steps": given.steps, "--micro-batch-tokens": given.micro_batch_tokens}
    words |= {"--trl-micro-batch": given.trl_micro_batch}
    argv = [sys.executable, given.script, *(str(part) for pair in words.items() for part in pair)]
    own = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
    own |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "WANDB_MODE": "disabled"}
    if side == "trl":
        own["PYTHONPATH"] = str(given.trl_folder)
    log = stack.enter_context((given.logs / f"{side}.log").open("w", encoding="utf-8"))
    process = subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=log, stderr=log, text=True, pass_fds=[far], env=os.environ | own
    )
    os.close(far)
    assert process.stdin is not None
    stack.callback(process.wait)
    stack.callback(process.kill)
    stack.callback(process.stdin.close)
    return process.stdin, stack.enter_context(os.fdopen(near))


def summed_up(mine: Sequence[Step], theirs: Sequence[Step], same_ids: bool, float32: bool) -> dict[str, Any]:
    """The figures of both sides without their first step, the ratios, and whether both did the same work.

    `same_ids`: both were given the same tokens, so that their first means can be compared, too.
    """
    ratios = [a.seconds / b.seconds for a, b in zip(mine[1:], theirs[1:], strict=True)]
    wrong = [] if not same_ids else differences(mine[0], theirs[0], float32)
    tokens = [sum(step.tokens for step in steps) for steps in (mine, theirs)]
    if abs(tokens[0] / tokens[1] - 1) > SAME_TOKENS:
        wrong.append(f"rlreason learned from {tokens[0]} tokens, TRL from {tokens[1]}")
    sides = {"rlreason": mine, "trl": theirs}
    figures = {
        side: {
            "seconds": statistics.median(step.seconds for step in steps[1:]),
            "memory_mb": steps[-1].memory,
            "steps": [asdict(step) for step in steps],
        }
        for side, steps in sides.items()
    }
    memory = mine[-1].memory / theirs[-1].memory
    return {"ratio": statistics.median(ratios), "memory": memory, "valid": not wrong, "wrong": wrong, **figures}


def differences(mine: Step, theirs: Step, float32: bool) -> list[str]:
    """What shows that two first steps were not the same work; bfloat16 rounds, so its means may be a percent apart."""
    wrong = [] if mine.digest == theirs.digest else [f"token ids {mine.digest} and {theirs.digest}"]
    for name in ("log_prob", "entropy"):
        a, b = getattr(mine, name), getattr(theirs, name)
        if a is not None and b is not None and abs(a - b) > (CLOSE if float32 else 0.01 * abs(b)):
            wrong.append(f"the first mean {name} is {a:.6f} and TRL's {b:.6f}")
    return wrong


def sentence(row: dict[str, Any]) -> str:
    """What a row says of the equality of the work."""
    a, b = row["rlreason"]["steps"][0], row["trl"]["steps"][0]
    if row["wrong"]:
        return "NOT VALID, the two did other work: " + "; ".join(row["wrong"])
    same = "the same token ids" if a["digest"] == b["digest"] else "tokens of its own on each side"
    means = f"first mean log-prob {a['log_prob']:.5f}, TRL {b['log_prob']:.5f}"
    if a["entropy"] is not None and b["entropy"] is not None:
        means += f"; entropy {a['entropy']:.5f}, TRL {b['entropy']:.5f}"
    norms = f"gradient norm {a['grad_norm']:.4f}, TRL {b['grad_norm']:.4f}"
    return f"valid: {a['tokens']} tokens, TRL {b['tokens']}, {same}; {means}; {norms}"


def table(rows: dict[str, Any]) -> str:
    """The rows in Markdown: medians of processor seconds per step, the median ratio of pairs, memory above start."""
    lines = [
        "| same work | rlreason s | TRL s | ratio | rlreason MB | TRL MB | ratio | valid |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, row in rows.items():
        mine, theirs = row["rlreason"], row["trl"]
        seconds = f"{mine['seconds']:.2f} | {theirs['seconds']:.2f} | **{row['ratio']:.2f}**"
        memory = f"{mine['memory_mb']:.0f} | {theirs['memory_mb']:.0f} | {row['memory']:.2f}"
        lines.append(f"| {name} | {seconds} | {memory} | {'yes' if row['valid'] else 'NO'} |")
    return "\n".join(lines)
