"""The command line: compose the config, check it, run one run per process.

The only room that knows Hydra's runner. Heavy libraries are imported when a checked run starts, so that
`--help` and a typo are answered at once.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from rlreason.config.run import Training
from rlreason.config.store import register, resource_dir, typed
from rlreason.config.words import check_words, handout_names, is_question, quoted
from rlreason.errors import ConfigError
from rlreason.sweeps import JOB_OF_SWEEP, Arm, arms_table

#: What each job of a sweep came to, in order; filled by the parent process of a sweep only.
ARMS: list[Arm] = []


@hydra.main(version_base="1.3", config_path=str(resource_dir("conf")), config_name="config")
def main(cfg: DictConfig) -> float:
    """One job: a whole run, or, inside a sweep, the start of a process of its own."""
    try:
        return job(cfg)
    except ConfigError as error:
        say_mistake(error)
        sys.exit(2)


def job(cfg: DictConfig) -> float:
    run = typed(cfg)
    config = OmegaConf.to_yaml(cfg, resolve=True)
    hydra_job = HydraConfig.get()
    folder = Path(hydra_job.runtime.output_dir)
    if hydra_job.mode is RunMode.MULTIRUN:
        arm = in_own_process(folder, list(hydra_job.overrides.task), config)
        ARMS.append(arm)
        return arm.accuracy
    sweep = hydra_job.runtime.choices.get("sweep")
    if sweep and JOB_OF_SWEEP not in os.environ:
        raise ConfigError(f"sweep={sweep} is a grid of runs: add -m (python -m rlreason -m sweep={sweep})")
    if isinstance(run, Training):
        from rlreason.trainer import train  # torch loads here

        return train(run, folder, config)
    from rlreason.jobs.start import start

    return start(run, folder, config)


def in_own_process(folder: Path, overrides: list[str], config: str) -> Arm:
    """One job of a sweep: what it crashes or leaks ends with it; a finished one is not run again."""
    summary = folder / "summary.json"
    if summary.exists():
        if (folder / "config.yaml").read_text() != config:
            raise ConfigError(f"{folder} is a finished run of another config: move it away, or set hydra.sweep.dir")
        print(f"\n== {folder.name}: finished before, not run again")
        return Arm(folder.name, json.loads(summary.read_text()))
    print(f"\n== {folder.name}", flush=True)
    argv = [sys.executable, "-m", "rlreason", *folder_flags(sys.argv[1:]), *overrides, f"hydra.run.dir='{folder}'"]
    code = subprocess.run(argv, env=os.environ | {JOB_OF_SWEEP: "1"}, check=False).returncode
    if code or not summary.exists():
        return Arm(folder.name, {"status": f"failed (exit code {code})"})
    return Arm(folder.name, json.loads(summary.read_text()))


def folder_flags(words: list[str]) -> list[str]:
    """The flags that bring in a user's own options, for the processes of a sweep.

    >>> folder_flags(["-m", "--config-dir", "mine", "seed=0,1"])
    ['--config-dir', 'mine']
    """
    flags = ("--config-dir", "-cd")
    return [
        word
        for before, word in zip(["", *words], words, strict=False)
        if word in flags or before in flags or word.startswith("--config-dir=")
    ]


def say_mistake(error: ConfigError) -> None:
    for line in str(error).splitlines():
        print(f"rlreason: {line}", file=sys.stderr)


def cli() -> None:
    """Entry of `python -m rlreason` and of the `rlreason` script. A user's mistake: one line, exit code 2."""
    register()
    try:
        sys.argv[1:] = quoted(handout_names(sys.argv[1:]))
        if not is_question(sys.argv[1:]):
            check_words(sys.argv[1:])
        main()
    except ConfigError as error:
        say_mistake(error)
        sys.exit(2)
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        sys.stdout = None  # type: ignore[assignment]  # nothing is flushed into the closed pipe at exit
        sys.exit(141)
    except KeyboardInterrupt:
        print("\nrlreason: stopped; what was recorded stays in the run folder", file=sys.stderr)
        sys.exit(130)
    if ARMS:
        print("\n" + arms_table(ARMS))
        sys.exit(1 if any(arm.failed for arm in ARMS) else 0)
