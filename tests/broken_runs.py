"""Runs that are interrupted on purpose, and the unbroken run of the same settings that each must equal in the end.

They start from the shipped model, which answers some questions correctly, so that every step learns.
"""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from filelock import FileLock

from tests.killed import AT, SIGNAL
from tests.run_records import differences, rows_of
from tests.starts import of_all_processes, rlreason

Done = subprocess.CompletedProcess[str]
START = ("algorithm=sft", "n_steps=1", "eval_every=0", "eval_problems=8", "checkpoint.every=0", "hydra.run.dir=start")
SHARED = (
    "model=local", "data=stories", "prompt=r1_zero_short", "scale=embedded", "data.n_train=64", "data.n_validation=16",
    "eval_problems=8", "eval_every=1", "sampling.max_tokens=32", "checkpoint.every=1", "threads=1", "log_generations=0",
    "grading.timeout_s=60", "grading.start_timeout_s=600", "checkpoint.keep_final=true",
)  # fmt: skip
GRPO = ("n_steps=3", "rollout_batch_size=16", "group_size=4")
EI = ("algorithm=ei", "n_ei_steps=2", "question_batch_size=8", "group_size=4", "train_batch_size=8")
OFF_POLICY = (*GRPO, "n_steps=2", "loss=grpo_clip", "epochs_per_rollout=2", "train_batch_size=8", "eval_every=null")
KINDS = {
    "grpo": GRPO,
    "off_policy": OFF_POLICY,
    "ei": EI,
    "star": (*EI, "restart=true"),
    "sft": ("algorithm=sft", "n_steps=3", "train_batch_size=16", "warmup_steps=1", "lr_schedule=linear"),
    "lora": (*GRPO, "model.lora.rank=4"),
    "adamw_8bit": (*GRPO, "optimizer=adamw_8bit"),
    # an update overflows, so that the scale changes
    "float16": (*GRPO, "n_steps=4", "model.dtype=float16", "length_norm=constant", "length_norm.constant=1"),
    "skip_solved": (*GRPO, "skip_solved=1", "data.n_train=12"),
    "reference": (*GRPO, "kl_placement=loss", "kl_coef=0.1"),
    "refilled": (*GRPO, "max_resampling_rounds=2"),
    "final_problems": (*GRPO, "eval_problems=null", "interim_eval_problems=4", "eval.final_problems=12"),
    "sets": (
        *GRPO,
        "eval.sets=[stories_hard,stories_long]",
        "eval.sets.stories_hard.samples=2",
        "eval.sets.stories_long.problems=12",
        "interim_eval_problems=4",
        "eval_problems=null",
    ),
    "cosine": (*GRPO, "lr_schedule=cosine", "warmup_steps=1", "save_rollouts_every=2"),
}


class Runs:
    """Runs in one folder. An unbroken one is run when it is first needed, once for all test processes."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self.shared = of_all_processes(factory) / "unbroken_runs"
        self.place = factory.mktemp("broken_runs")
        self.count = 0

    def words(self, kind: str, *more: str) -> tuple[str, ...]:
        """Return the overrides but for the run folder; of several with one key, the last."""
        model = f"model.path={self._once('start', START) / 'model'}"
        by_key = {word.partition("=")[0]: word for word in (*SHARED, model, *KINDS[kind], *more)}
        return tuple(by_key.values())

    def unbroken(self, kind: str, *more: str) -> Path:
        """Return the folder of the run that nothing has interrupted."""
        name = "_".join((kind, *more)).replace("=", "_")
        folder = self._once(name, (*self.words(kind, *more), f"hydra.run.dir={name}"))
        assert kind != "float16" or any(row.get("train/overflows") for row in rows_of(folder))
        return folder

    def _once(self, name: str, words: tuple[str, ...]) -> Path:
        self.shared.mkdir(exist_ok=True)
        with FileLock(self.shared / f"{name}.lock"):
            folder = self.shared / name
            if not (folder / "summary.json").exists():
                done = rlreason(*words, cwd=self.shared)
                assert done.returncode == 0, done.stdout + done.stderr
        return folder

    def new(self) -> Path:
        """Return a folder for another run, which does not exist yet."""
        self.count += 1
        return self.place / str(self.count)

    def start(self, kind: str, folder: Path, *more: str, at: str = "", by: str = "SIGKILL") -> Done:
        """Run the command, with a signal at the place `at` of its code (`killed.py`)."""
        env = {AT: at, SIGNAL: by} if at else {}
        return rlreason(*self.words(kind, *more), f"hydra.run.dir={folder.name}", cwd=self.place, **env)

    def killed(self, kind: str, folder: Path, at: str, *more: str) -> None:
        """Run the command, which must reach the place and be killed there."""
        done = self.start(kind, folder, *more, at=at)
        assert done.returncode == -9, f"{at} was not reached: {done.stdout}{done.stderr}"

    def interrupted(self, kind: str, folder: Path, at: str, by: str, *more: str) -> None:
        """Run the command and signal it at the place: it must stop in order and say so."""
        done = self.start(kind, folder, *more, at=at, by=by)
        said = done.stdout + done.stderr
        assert (done.returncode, "Traceback" in said, f"stopped by {by}" in done.stderr) == (130, False, True), said
        assert json.loads((folder / "status.json").read_text())["status"] == "interrupted"

    def goes_on(self, kind: str, folder: Path, *more: str) -> Done:
        """Run the same command again, which must finish."""
        done = self.start(kind, folder, *more)
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    def equal(self, kind: str, folder: Path, *more: str) -> bool:
        """Return whether the run equals the unbroken one bit for bit; remove its folder, because there are many."""
        assert differences(self.unbroken(kind, *more), folder) == []
        shutil.rmtree(folder)
        return True


def parts_of(folder: Path) -> int:
    """Return how many commands have written the run."""
    return 1 + len(json.loads((folder / "provenance.json").read_text()).get("earlier_parts", []))


def norms_of(folder: Path) -> list[float]:
    return [row["train/grad_norm"] for row in rows_of(folder) if "train/grad_norm" in row]


def checkpoints_of(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").glob("*"))
