"""The first ten minutes on a card, in one command: `python benchmarks/gpu_check.py --model DIR`.

Every line of the table is a check in a process of its own, so that one that crashes leaves the others. It says what
was measured, whether that passes, and where it does not, the likely cause. `--quick` takes a quarter of the rounds,
`--only kernels,head` some of the checks, `--json FILE` writes all figures. Exits with 1 where a check fails.

One H200 has run updates and the in-process engine; nothing else here has run on a GPU, this script
neither. Without one it does what a processor allows, and says what it left out: sleeping frees
no memory there, weights reach another process through a memory file, and two ranks share the processor.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks")]

PATIENCE_S = 900.0  # for one check: a start of vLLM with CUDA graphs takes one or two minutes
LAST = 400  # characters that are told of what a check said before it crashed


class Check(NamedTuple):
    """A check: where it is, and what is most likely wrong where it fails."""

    module: str
    cause: str


CHECKS = {
    "parity_float32": Check(
        "engines",
        "vLLM's attention multiplies in TF32: TRITON_F32_DEFAULT=ieee must be set before Triton compiles; or float32 "
        "products of the trainer are TF32 (torch.get_float32_matmul_precision() must be highest)",
    ),
    "parity_bfloat16": Check(
        "engines", "vLLM's head is not bfloat16 x bfloat16 into float32 (hf_overrides.head_dtype), or a fused kernel"
    ),
    "kernels": Check("training", "the variable-length kernel: choose model.attention=sdpa, and report torch's version"),
    "head": Check("training", "torch.mm with out_dtype is slow or missing here: choose model.head=float32"),
    "memory": Check(
        "training", "the plan counts other tensors than torch keeps: lower micro_batch_tokens by the difference"
    ),
    "sleep": Check("engines", "vLLM keeps memory over a sleep: set rollout.sleep=false and rollout.kv_cache_gb=4"),
    "hand_overs": Check(
        "engines", "weights are copied before the optimizer has written them: a stream that nobody waits for"
    ),
    "overlap": Check("runs", "sampling and learning wait for each other: the GPU is full with one of them"),
    "second_gpu": Check("engines", "NCCL between two processes: try NCCL_P2P_DISABLE=1, and rlreason doctor"),
    "ranks": Check("runs", "NCCL, or a rank that has other micro-batches: read ranks.log in the run's folder"),
}


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model folder; without it a random model of 5 M parameters is made")
    parser.add_argument("--only", default=",".join(CHECKS), help="names of checks, with commas between them")
    parser.add_argument("--quick", action="store_true", help="a quarter of the rounds")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--patience", type=float, default=PATIENCE_S, metavar="S", help="seconds for one check")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # in a process of its own
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    if unknown := [name for name in args.only.split(",") if name not in CHECKS]:
        parser.error(f"--only {unknown[0]}: the checks are {', '.join(CHECKS)}")
    return args


def one(name: str, model: str, folder: Path, quick: bool) -> None:
    """Do one check here, and leave what it found in its folder."""
    from gpu_checks.common import Asked

    check = getattr(importlib.import_module(f"gpu_checks.{CHECKS[name].module}"), name)
    found = check(Asked(model, folder, quick))
    (folder / f"{name}.json").write_text(json.dumps(asdict(found)), encoding="utf-8")


def apart(name: str, model: str, folder: Path, quick: bool, patience_s: float) -> dict[str, Any]:
    """What a check finds in a process of its own: {passed, words, figures, seconds}."""
    command = [sys.executable, __file__, "--one", name, "--model", model, "--folder", str(folder)]
    log, began = folder / f"{name}.out", time.monotonic()
    with log.open("wb") as out:
        child = subprocess.Popen(
            command + ["--quick"] * quick, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code: int | str = child.wait(patience_s)
        except subprocess.TimeoutExpired:
            code = f"no end within {patience_s:g} s"
        finally:
            end(child)
    told = {"seconds": round(time.monotonic() - began, 1)}
    result = folder / f"{name}.json"
    if result.exists():
        return json.loads(result.read_text(encoding="utf-8")) | told
    said = log.read_text(encoding="utf-8", errors="replace").strip()[-LAST:]
    lines = said.splitlines()
    return {
        "passed": False,
        "words": f"crashed ({code}): {lines[-1] if lines else ''}",
        "figures": {"said": said},
    } | told


def end(child: subprocess.Popen[bytes]) -> None:
    """End a check and all that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, 9)
    child.wait()


def lines_of(found: dict[str, dict[str, Any]]) -> list[str]:
    """The table: a line for each check, with the likely cause below one that fails."""
    lines = []
    for name, row in found.items():
        state = {True: "pass", False: "FAIL", None: "-"}[row["passed"]]
        lines.append(f"{state:4}  {name:16} {row['seconds']:6.1f} s  {row['words']}")
        if row["passed"] is False:
            lines.append(f"{'':4}  {'':16} likely cause: {CHECKS[name].cause}")
    return lines


def main() -> None:
    """Run the checks that are asked for; exit code 1 where one fails."""
    args = arguments()
    if args.one:
        one(args.one, args.model, args.folder, args.quick)
        return
    import torch

    gpus = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
    print(", ".join(gpus) if gpus else "no GPU here: what a processor allows", flush=True)
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as place:
        model = str(Path(args.model).resolve()) if args.model else small_model(Path(place) / "model")
        for name in args.only.split(","):
            found[name] = apart(name, model, Path(place), args.quick, args.patience)
            print("\n".join(lines_of({name: found[name]})), flush=True)
    failed = [name for name, row in found.items() if row["passed"] is False]
    if args.json:
        about = {"gpus": gpus, "torch": str(torch.__version__), "model": args.model, "quick": args.quick}
        args.json.write_text(json.dumps(about | {"checks": found}, indent=2) + "\n", encoding="utf-8")
    print(f"failed: {', '.join(failed)}" if failed else "no check failed")
    sys.exit(bool(failed))


def small_model(folder: Path) -> str:
    """A random model with its tokenizer, for whoever has none at hand."""
    from against_trl import save_small

    from rlreason.data.tasks import make_stories

    save_small(folder, [f"{p.question} {p.solution}" for p in make_stories(200, seed=0)])
    return str(folder)


if __name__ == "__main__":
    main()
