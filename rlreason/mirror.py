"""Weights & Biases as a second sink of the metrics. The run folder stays the record."""

from pathlib import Path
from typing import Any

from rlreason.errors import ConfigError

COLUMNS = (
    "question", "response", "gold", "format_reward", "answer_reward", "reward", "outcome", "entropy", "length",
)  # fmt: skip


class WandbMirror:
    """Sends every metrics row; training rows are drawn over `train_step`, evaluations over `eval_step`."""

    def __init__(self, folder: Path, project: str, mode: Any, config: dict[str, Any]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                "logger=wandb needs the wandb package: pip install wandb, or choose logger=none"
            ) from error
        if mode not in ("online", "offline"):
            raise ConfigError(f"logger.mode={mode} is none of online, offline: choose one")
        try:
            self.run = wandb.init(project=project, mode=mode, dir=str(folder), name=folder.name, config=config)
        except Exception as error:  # network, login and quota problems come as many kinds
            raise ConfigError(
                f"logger=wandb could not start ({error}): run `wandb login`, or use logger.mode=offline"
            ) from error
        for step, names in (("train_step", ("train/*", "reward/*", "rollout/*", "time/*")), ("eval_step", ("eval/*",))):
            self.run.define_metric(step)
            for name in names:
                self.run.define_metric(name, step_metric=step)

    def log(self, row: dict[str, float]) -> None:
        self.run.log(row)

    def table(self, name: str, counters: dict[str, float], rows: list[dict[str, Any]]) -> None:
        """Responses to read: question, response, gold answer, rewards, entropy and length."""
        import wandb

        data = [[row["step"], *(row[column] for column in COLUMNS)] for row in rows]
        self.run.log({f"generations/{name}": wandb.Table(["step", *COLUMNS], data), **counters})

    def finish(self, summary: dict[str, Any]) -> None:
        self.run.summary.update(summary)
        self.run.finish()
