"""Whether a run of discovery goes on with what is in its folder: with all that it has asked, and nothing else."""

from pathlib import Path

from rlreason.config.budget import raised
from rlreason.config.discover import BUDGETS
from rlreason.config.leaves import below
from rlreason.errors import ConfigError
from rlreason.records.files import CALLS, CONFIG, SUMMARY
from rlreason.records.resume import changed, flat_text

#: Settings that a run may go on with others of: what it may spend, where the same model is asked, how long it waits.
MAY_CHANGE = (
    "budget", "waits", "client.base_url", "client.env_variable", "client.timeout_s", "client.retries", "client.pause_s",
    "client.max_tokens", "client.extra", "client.prompt_price", "client.completion_price", "score.workers",
)  # fmt: skip


def discovery_goes_on(folder: Path, config: str) -> bool:
    """Whether a run with this config continues the one in the folder; a finished one where its budget was raised.

    `ConfigError` where the folder holds one with other settings, or one that has nothing left to do.
    """
    path = folder / CONFIG
    now = flat_text(config)
    if now.get("algorithm") != "discover" or not path.exists() or not (folder / CALLS).exists():
        return False
    before = flat_text(path.read_text(encoding="utf-8", errors="replace"))
    if different := changed(before, now, MAY_CHANGE):
        raise ConfigError(
            f"hydra.run.dir={folder} holds a run with other settings ({different}): type its command again to go on "
            f"with it (resume={folder}), or choose another folder"
        )
    if not (folder / SUMMARY).exists():
        return True
    if not raised(below(before, "budget."), below(now, "budget."), BUDGETS):
        key = next((f"budget.{name}" for name in BUDGETS if before.get(f"budget.{name}") is not None), "budget.calls")
        raise ConfigError(
            f"hydra.run.dir={folder} holds a finished run that has spent its budget: choose another folder, or type "
            f"resume={folder} {key}=MORE"
        )
    return True
