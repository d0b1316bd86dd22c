"""Slurm's commands as far as submitit uses them, on this machine: `sbatch`, `srun`, `sacct` and `scancel`.

    python fake_slurm.py COMMAND ARGUMENTS        as the scripts do that `installed` writes

Jobs wait until one of `FAKE_SLURM_NODES` places is free, run in a session of their own, see the GPUs that they asked
for, and are sent SIGTERM and then SIGKILL when they are cancelled. What is
known of a job lies in a file of its own.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

FOLDER, NODES = "FAKE_SLURM", "FAKE_SLURM_NODES"
GRACE_S = 20.0  # between SIGTERM and SIGKILL
PARTITIONS = ("course",)


def installed(place: Path, nodes: int = 2) -> dict[str, str]:
    """Make the commands in a folder; the environment in which they are found."""
    (place / "bin").mkdir(parents=True)
    (place / "jobs").mkdir()
    for name in ("sbatch", "srun", "sacct", "scancel"):
        path = place / "bin" / name
        path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{Path(__file__).resolve()}" {name} "$@"\n')
        path.chmod(0o755)
    return {"PATH": f"{place / 'bin'}:{os.environ['PATH']}", FOLDER: str(place), NODES: str(nodes)}


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
        (jobs() / f"{name}.job").write_text(json.dumps({"state": "PENDING", "given": given}))
    argv = [sys.executable, __file__, "node", script, given.get("gpus-per-node", "0"), *names]
    quiet = subprocess.DEVNULL
    subprocess.Popen(argv, start_new_session=True, stdin=quiet, stdout=quiet, stderr=quiet)
    print(f"Submitted batch job {number}")


def node(script: str, gpus: str, *names: str) -> None:
    """Run jobs as places become free, until all have ended."""
    waiting, running = list(names), {}
    while waiting or running:
        waiting = [name for name in waiting if (jobs() / f"{name}.job").exists()]  # the others were cancelled
        while waiting and len(running) < int(os.environ[NODES]):
            name = waiting.pop(0)
            path = jobs() / f"{name}.job"
            running[name] = process = _started(script, gpus, name)
            path.write_text(json.dumps(json.loads(path.read_text()) | {"state": "RUNNING", "pid": process.pid}))
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
        with suppress(OSError, ValueError):
            state = {".done": "COMPLETED", ".cancelled": "CANCELLED"}.get(path.suffix)
            print(path.stem, state or json.loads(path.read_text())["state"], "here", sep="|")


def scancel(*names: str) -> None:
    """Take jobs off the queue, and end those under way."""
    for name in names:
        with suppress(OSError, ValueError):
            told = json.loads((jobs() / f"{name}.job").read_text())
            if told["state"] == "PENDING":
                (jobs() / f"{name}.job").rename(jobs() / f"{name}.cancelled")
            elif not os.fork():
                os.setsid()
                for number in (signal.SIGTERM, signal.SIGKILL):
                    os.killpg(told["pid"], number)
                    time.sleep(GRACE_S)
                os._exit(0)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
