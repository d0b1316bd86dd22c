"""Read a finished run's folder back: what it was asked for, and the responses of one step.

It knows the files that `records` writes and the schemas of the configuration; it must not know tensors.
"""

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlreason.config.former_names import renewed
from rlreason.config.grpo import GRPOConfig
from rlreason.config.store import SCHEMAS
from rlreason.errors import ConfigError
from rlreason.records.writer import sample_of
from rlreason.types import Sample


def read_run(folder: Path) -> GRPOConfig:
    """The settings of a finished run, from its resolved `config.yaml`."""
    if not folder.is_dir():
        raise ConfigError(f"RUN={folder} is no folder: give the folder of a finished run, as its last line named it")
    if not (folder / "config.yaml").is_file():
        raise ConfigError(f"RUN={folder} holds no config.yaml: give the folder of one run, not one that holds several")
    if not (folder / "summary.json").is_file():
        raise ConfigError(
            f"RUN={folder} holds no summary.json, so the run has not finished: let it end, or run it again"
        )
    node: Any = renewed(OmegaConf.load(folder / "config.yaml"))
    if node.get("algorithm") != "grpo":
        raise ConfigError(f"RUN={folder} is a run of algorithm={node.get('algorithm')}: give one of algorithm=grpo")
    if "warm_start" in node.get("model", {}) and "seed" not in node.model:
        node.model.seed = node.seed  # before model.seed was a setting, the run's own decided the start model
    for key in ("baseline", "std_norm"):  # once groups with one word
        node[key] = OmegaConf.select(node, f"{key}.kind") or node.get(key)
    if "refill_rounds" in node:
        node.max_resampling_rounds = node.pop("refill_rounds")
    try:
        schema = OmegaConf.structured(GRPOConfig)
        for group in ("model", "data"):
            schema[group] = _schema_of(group, set(node[group]))
        if own := OmegaConf.select(node, "eval.data"):
            schema.eval.data = _schema_of("data", set(own))
        run = OmegaConf.to_object(OmegaConf.merge(schema, node))
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"RUN={folder}: its config.yaml is not of this version ({reason}): repeat the run with this version"
        ) from error
    assert isinstance(run, GRPOConfig)
    if not (folder / "model").is_dir():
        raise ConfigError(f"RUN={folder} holds no model/ (save_model={run.save_model}): repeat it with save_model=true")
    return run


def _schema_of(group: str, keys: set[str]) -> Any:
    """The schema of a config group's options that has the most of these keys, and the fewest others."""

    def fit(schema: type) -> tuple[int, int]:
        names = {f.name for f in fields(schema)}
        return len(names & keys), -len(names)

    return max(SCHEMAS[f"schema/{group}"].values(), key=fit)


def saved_steps(folder: Path) -> list[int]:
    return sorted(int(path.stem.removeprefix("step_")) for path in (folder / "rollouts").glob("step_*.jsonl"))


def read_step(folder: Path, run: GRPOConfig, step: int | None = None) -> tuple[int, list[Sample]]:
    """The responses of a saved training step, by default of the last one, with no credit given yet.

    Their old log-probabilities are those of the policy that sampled, as the trainer scored it or, where it did not, as
    the engine reported it; so under the final policy the ratios differ from 1.
    """
    steps = saved_steps(folder)
    if not steps:
        raise ConfigError(
            f"RUN={folder} saved no rollouts (save_rollouts_every={run.save_rollouts_every}, n_steps={run.n_steps}): "
            "repeat it with save_rollouts_every=1"
        )
    chosen = steps[-1] if step is None else step
    if chosen not in steps:
        raise ConfigError(f"--step {chosen} was not saved: choose one of {_spans(steps)}")
    text = (folder / "rollouts" / f"step_{chosen:05d}.jsonl").read_text(encoding="utf-8")
    samples = [sample_of(json.loads(line)) for line in text.splitlines()]
    known = [s.log_probs or s.response.log_probs for s in samples]
    return chosen, [replace(s, log_probs=lp, old_log_probs=lp) for s, lp in zip(samples, known, strict=True)]


def _spans(steps: list[int]) -> str:
    """Steps in few words.

    >>> _spans([1, 2, 3, 10, 20])
    '1-3, 10, 20'
    """
    spans: list[list[int]] = []
    for step in steps:
        if spans and step == spans[-1][1] + 1:
            spans[-1][1] = step
        else:
            spans.append([step, step])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
