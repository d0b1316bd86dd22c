"""Slurm's commands as far as submitit uses them, on this machine: `sbatch`, `srun` and `sacct`.

    python fake_slurm.py COMMAND ARGUMENTS        as the scripts do that `installed` writes

Jobs wait until one of two places is free, run in a session of their own, and see the GPUs that they asked for. What is
known of a job lies in a file of its own.
"""

import os
import re
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

FOLDER, NODES = "FAKE_SLURM", 2
PARTITIONS = ("course",)


def installed(place: Path) -> dict[str, str]:
    """Make the commands in a folder; the environment in which they are found."""
    (place / "bin").mkdir(parents=True)
    (place / "jobs").mkdir()
    for name in ("sbatch", "srun", "sacct"):
        path = place / "bin" / name
        path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{Path(__file__).resolve()}" {name} "$@"\n')
        path.chmod(0o755)
    return {"PATH": f"{place / 'bin'}:{os.environ['PATH']}", FOLDER: str(place)}


def jobs() -> Path:
    return Path(os.environ[FOLDER]) / "jobs"


def sbatch(script: str) -> None:
    """Queue a job, or an array of them, and say its number."""
    text = Path(script).read_text()
    given = dict(re.findall(r"^#SBATCH --([\w-]+)=(.*)$", text, re.MULTILINE))
    if given.get("partition") not in PARTITIONS:
        sys.exit("sbatch: error: invalid partition specified: " + str(given.get("partition")))
    number = 1 + max((int(path.stem.split("_")[0]) for path in jobs().glob("*")), default=100)
    tasks = range(1 + int(given["array"].split("%")[0].split("-")[1])) if "array" in given else [None]
    names = [str(number) if task is None else f"{number}_{task}" for task in tasks]
    for name in names:
        (jobs() / f"{name}.job").write_text("PENDING")
    argv = [sys.executable, __file__, "node", script, given.get("gpus-per-node", "0"), *names]
    quiet = subprocess.DEVNULL
    subprocess.Popen(argv, start_new_session=True, stdin=quiet, stdout=quiet, stderr=quiet)
    print(f"Submitted batch job {number}")


def node(script: str, gpus: str, *names: str) -> None:
    """Run jobs as places become free, until all have ended."""
    waiting, running = list(names), {}
    while waiting or running:
        while waiting and len(running) < NODES:
            name = waiting.pop(0)
            running[name] = _started(script, gpus, name)
            (jobs() / f"{name}.job").write_text("RUNNING")
        for name, process in list(running.items()):
            if process.poll() is not None:
                del running[name]
                (jobs() / f"{name}.job").rename(jobs() / f"{name}.done")
        time.sleep(0.1)


def _started(script: str, gpus: str, name: str) -> subprocess.Popen:
    number, _, task = name.partition("_")
    env = {"SLURM_JOB_ID": number, "SLURM_NTASKS": "1", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "here"}
    env |= {"SLURM_NODEID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    env |= {"SLURM_ARRAY_JOB_ID": number, "SLURM_ARRAY_TASK_ID": task} if task else {}
    env |= {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(int(gpus))))} if gpus != "0" else {}
    return subprocess.Popen(["bash", script], env=os.environ | env, start_new_session=True)


def srun(*words: str) -> None:
    """Become the command, with its output where it belongs."""
    rest = list(words)
    here = {"%j": os.environ["SLURM_JOB_ID"], "%t": "0", "%A": os.environ.get("SLURM_ARRAY_JOB_ID", "")}
    here["%a"] = os.environ.get("SLURM_ARRAY_TASK_ID", "")
    for option, number in (("--output", 1), ("--error", 2)):
        at = rest.index(option)
        path = rest[at + 1]
        del rest[at : at + 2]
        for mark, value in here.items():
            path = path.replace(mark, value)
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    rest.remove("--unbuffered")
    os.execvp(rest[0], rest)


def sacct(*_: str) -> None:
    """Name all jobs with their states."""
    print("JobID|State|NodeList")
    for path in sorted(jobs().iterdir()):
        with suppress(OSError):
            print(path.stem, "COMPLETED" if path.suffix == ".done" else path.read_text(), "here", sep="|")


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
