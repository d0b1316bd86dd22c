"""TensorBoard, in a folder of the run folder."""

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rlreason.config.groups import LoggerConfig
from rlreason.records.files import TENSORBOARD
from rlreason.records.loggers.base import COLUMNS, COUNTERS, Row, axis_of

FLUSHED_EVERY_S = 10


class TensorBoardLogger:
    """Each metric over its counter, responses, settings and summary as text."""

    cure = f"see that the run folder's {TENSORBOARD}/ can be written, or choose logger=none"

    def __init__(self, folder: Path, settings: LoggerConfig, config: dict[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._folder = folder / TENSORBOARD
        self._writer = SummaryWriter(str(self._folder), flush_secs=FLUSHED_EVERY_S)
        self._step = 0  # the newest train_step
        self.place = f"tensorboard --logdir {shlex.quote(os.path.relpath(self._folder))}"
        self._text("config", yaml.safe_dump(config, sort_keys=False, allow_unicode=True), 0)

    def log(self, row: Row) -> None:
        """Every metric at the step of its counter."""
        self._check()
        self._step = int(row["train_step"])
        for name, value in row.items():
            if name not in COUNTERS:
                self._writer.add_scalar(name, value, int(row[axis_of(name)]))

    def table(self, name: str, step: int, rows: Sequence[Mapping[str, Any]], counters: Row) -> None:
        """The responses of a step as one text."""
        shown = "\n\n".join("\n".join(f"{column}: {row[column]}" for column in COLUMNS) for row in rows)
        tag = f"generations/{name}"
        self._text(tag, f"step: {step}\n\n{shown}", int(counters[axis_of(tag)]))

    def finish(self, summary: Mapping[str, Any]) -> None:
        """The summary as text, and everything to the disk."""
        self._text("summary", yaml.safe_dump(summary, sort_keys=False, allow_unicode=True), self._step)
        self.abandon()

    def abandon(self) -> None:
        """Everything to the disk."""
        self._writer.close()

    def _check(self) -> None:
        """The folder holds its file: TensorBoard would fail in a thread of its own, with a traceback."""
        if not any(self._folder.iterdir()):
            raise FileNotFoundError(f"{self._folder} was emptied")

    def _text(self, tag: str, text: str, step: int) -> None:
        """A text as it is: TensorBoard reads Markdown, in which four spaces keep a line from being read."""
        self._check()
        self._writer.add_text(tag, "\n".join(f"    {line}" for line in text.splitlines()), step)
