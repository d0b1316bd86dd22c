"""TensorBoard, in a folder of the run folder."""

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rlreason.config.groups import LoggerConfig
from rlreason.records.files import TENSORBOARD
from rlreason.records.loggers.base import COLUMNS, COUNTERS, Known, Row, Sent, axis_of

FLUSHED_EVERY_S = 10
_TABLE = re.compile(r"generations/(\w+)/text_summary")  # the tag of a table
_STEP = re.compile(r"step: (\d+)")  # in its first line


class TensorBoardLogger:
    """Each metric over its counter, responses, settings and summary as text."""

    cure = f"see that the run folder's {TENSORBOARD}/ can be written, or choose logger=none"

    def __init__(self, folder: Path, settings: LoggerConfig, config: dict[str, Any], known: Known) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._folder = folder / TENSORBOARD
        self._before = sorted(self._folder.glob("events.*")) if known.goes_on else []
        self._writer = SummaryWriter(str(self._folder), flush_secs=FLUSHED_EVERY_S)
        self.place = f"tensorboard --logdir {shlex.quote(os.path.relpath(self._folder))}"
        if not self._before:
            self._text("config", yaml.safe_dump(config, sort_keys=False, allow_unicode=True), 0)

    def sent(self) -> Sent:
        """What stands in the event files of the parts before; what was not yet written when one was killed does not."""
        from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

        sent = Sent()
        for path in self._before:
            for event in LegacyEventFileLoader(str(path)).Load():
                for value in event.summary.value:
                    if kind := _TABLE.fullmatch(value.tag):
                        said = _STEP.search(value.tensor.string_val[0].decode("utf-8", "replace"))
                        sent.tables.update([(kind[1], int(said[1]))] if said else [])
                    else:
                        sent.metrics[value.tag, event.step] += 1
        return sent

    def log(self, row: Row) -> None:
        """Every metric at the step of its counter."""
        self._check()
        for name, value in row.items():
            if name not in COUNTERS:
                self._writer.add_scalar(name, value, int(row[axis_of(name)]))

    def table(self, name: str, step: int, rows: Sequence[Mapping[str, Any]], counters: Row) -> None:
        """The responses of a step as one text."""
        shown = "\n\n".join("\n".join(f"{column}: {row[column]}" for column in COLUMNS) for row in rows)
        tag = f"generations/{name}"
        self._text(tag, f"step: {step}\n\n{shown}", int(counters[axis_of(tag)]))
        self._writer.flush()  # or what was shown may be lost with the process

    def finish(self, summary: Mapping[str, Any], counters: Row) -> None:
        """The summary as text, and everything to the disk."""
        self._text("summary", yaml.safe_dump(summary, sort_keys=False, allow_unicode=True), int(counters["train_step"]))
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
