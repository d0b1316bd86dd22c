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
from pathlib import Path

NODES = 2
JOBS = Path(os.environ.get("FAKE_SLURM", ".")) / "jobs"


def installed(place: Path) -> dict[str, str]:
    """Make the commands in a folder; the environment in which they are found."""
    (place / "bin").mkdir(parents=True)
    (place / "jobs").mkdir()
    for name in ("sbatch", "srun", "sacct"):
        path = place / "bin" / name
        path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{Path(__file__).resolve()}" {name} "$@"\n')
        path.chmod(0o755)
    return {"PATH": f"{place / 'bin'}:{os.environ['PATH']}", "FAKE_SLURM": str(place)}


def sbatch(script: str) -> None:
    """Queue a job, or an array of them, and say its number."""
    given = dict(re.findall(r"^#SBATCH --([\w-]+)=(.*)$", Path(script).read_text(), re.MULTILINE))
    if given.get("partition") != "course":
        sys.exit(f"sbatch: error: invalid partition specified: {given.get('partition')}")
    number = 1 + max((int(path.stem.split("_")[0]) for path in JOBS.glob("*")), default=100)
    tasks = range(1 + int(given["array"].split("%")[0].split("-")[1])) if "array" in given else [None]
    names = [str(number) if task is None else f"{number}_{task}" for task in tasks]
    for name in names:
        (JOBS / f"{name}.job").write_text("PENDING")
    argv = [sys.executable, __file__, "node", script, given.get("gpus-per-node", "0"), *names]
    quiet = subprocess.DEVNULL
    subprocess.Popen(argv, start_new_session=True, stdin=quiet, stdout=quiet, stderr=quiet)
    print(f"Submitted batch job {number}")


def node(script: str, gpus: str, *names: str) -> None:
    """Run jobs as places become free, until all have ended."""
    waiting, running = list(names), {}
    while waiting or running:
        while waiting and len(running) < NODES:
            number, _, task = (name := waiting.pop(0)).partition("_")
            env = {"SLURM_JOB_ID": number, "SLURM_NTASKS": "1", "SLURM_JOB_NUM_NODES": "1"}
            env |= {"SLURM_JOB_NODELIST": "here", "SLURM_NODEID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
            env |= {"SLURM_ARRAY_JOB_ID": number, "SLURM_ARRAY_TASK_ID": task} if task else {}
            env |= {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(int(gpus))))} if gpus != "0" else {}
            running[name] = subprocess.Popen(["bash", script], env=os.environ | env, start_new_session=True)
            (JOBS / f"{name}.job").write_text("RUNNING")
        for name in [name for name, process in running.items() if process.poll() is not None]:
            del running[name]
            (JOBS / f"{name}.job").rename(JOBS / f"{name}.done")
        time.sleep(0.1)


def srun(*words: str) -> None:
    """Become the command, with its output where it belongs."""
    rest, env = list(words), os.environ
    here = {"%j": env["SLURM_JOB_ID"], "%t": "0"}
    here |= {"%A": env.get("SLURM_ARRAY_JOB_ID", ""), "%a": env.get("SLURM_ARRAY_TASK_ID", "")}
    for option, number in (("--output", 1), ("--error", 2)):
        at = rest.index(option)
        path = re.sub("%[jtAa]", lambda mark: here[mark[0]], rest[at + 1])
        del rest[at : at + 2]
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    rest.remove("--unbuffered")
    os.execvp(rest[0], rest)


def sacct(*_: str) -> None:
    """Name all jobs with their states."""
    print("JobID|State|NodeList")
    for path in sorted(JOBS.iterdir()):
        print(path.stem, "COMPLETED" if path.suffix == ".done" else path.read_text(), "here", sep="|")


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
