"""What a run asks of the network: models and data of the hub, and a login at W&B. Nothing secret is shown."""

import netrc
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rlreason.config.run import RunConfig
from rlreason.doctor.finding import FAIL, OK, WARN, Finding

PATIENCE_S = 5.0
LOGIN = "wandb login, or set WANDB_API_KEY, or logger.mode=offline"


def hub_findings(run: RunConfig) -> list[Finding]:
    """Whether the model and the data are here, or can be had."""
    found = []
    folder = run.model.folder
    if folder is None:
        found.append(Finding("hub", OK, "not needed: the model is made here"))
    elif Path(folder).is_dir():
        found.append(Finding("hub", OK, f"not needed for the model, which is in {folder}"))
    elif is_cached(folder):
        found.append(Finding("hub", OK, f"not needed for the model: {folder} is in the cache"))
    else:
        found.append(asked(folder, f"{folder}/resolve/main/config.json", "model.path=DIR with a folder of your own"))
    for key, data in run.data_read().items():
        if data.on_hub:
            name = str(getattr(data, "path", ""))
            if where := dataset_in_cache(name):
                found.append(Finding("hub", OK, f"not needed for the data: {name} is in {where}"))
                continue
            own = f"{key}.path=DIR with train.jsonl and test.jsonl"
            found.append(asked(name, f"datasets/{name}/resolve/main/README.md", own))
    return found


def is_cached(name: str) -> bool:
    """Whether a model's config and its weights have been downloaded."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    weights = ("model.safetensors", "model.safetensors.index.json")
    try:
        there = [isinstance(try_to_load_from_cache(name, file), str) for file in ("config.json", *weights)]
    except HFValidationError:
        return False
    return there[0] and any(there[1:])


def dataset_in_cache(name: str) -> Path | None:
    """The folder of a data set that was downloaded before: the hub's snapshots, or what `datasets` made of it."""
    from huggingface_hub import constants

    home = Path(constants.HF_HOME)
    made = Path(os.environ.get("HF_DATASETS_CACHE") or home / "datasets") / name.replace("/", "___").lower()
    snapshots = Path(constants.HF_HUB_CACHE) / f"datasets--{name.replace('/', '--')}" / "snapshots"
    for folder, files in ((snapshots, "*/**/*.*"), (made, "**/*.arrow")):
        if folder.is_dir() and any(file.is_file() for file in folder.glob(files)):
            return folder
    return None


def asked(name: str, path: str, own: str) -> Finding:
    """Whether the hub would give a file away, by the head of one; `own`: how to do without the hub."""
    if offline(os.environ):
        words = f"{name} is not in the cache, and HF_HUB_OFFLINE forbids to ask the hub"
        return Finding("hub", FAIL, words, f"unset HF_HUB_OFFLINE, or give {own}")
    import httpx
    from huggingface_hub import constants, get_token

    headers = {"authorization": f"Bearer {token}"} if (token := get_token()) else {}
    try:
        answer = httpx.head(f"{constants.ENDPOINT}/{path}", headers=headers, timeout=PATIENCE_S)
    except httpx.HTTPError as error:
        return unreachable(name, own, f"{constants.ENDPOINT}: {type(error).__name__}")
    return answered(name, own, answer.status_code, bool(token))


def unreachable(name: str, own: str, why: str) -> Finding:
    """The finding where the hub gives no answer."""
    return Finding("hub", FAIL, f"{name} is not here, and the hub cannot be reached ({why})", f"give {own}")


def answered(name: str, own: str, status: int, has_token: bool) -> Finding:
    """The finding for an answer of the hub.

    >>> answered("a/b", "model.path=DIR", 307, False).state, answered("a/b", "model.path=DIR", 401, False).state
    ('ok', 'fail')
    """
    if status < 400:
        return Finding("hub", OK, f"{name} can be downloaded")
    if status in (401, 403):
        cure = f"accept its terms on its page{'' if has_token else ', then: hf auth login'}; or give {own}"
        return Finding("hub", FAIL, f"the hub does not give {name} away to you (status {status})", cure)
    if status == 404:
        return Finding("hub", FAIL, f"the hub has no {name}", f"fix the name, or give {own}")
    return Finding("hub", WARN, f"the hub answers for {name} with status {status}", "try again later")


def offline(environment: Mapping[str, str]) -> bool:
    """Whether the hub must not be asked."""
    return any(environment.get(name, "").upper() in ("1", "ON", "YES", "TRUE") for name in OFFLINE)


OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


def wandb_findings(logger: Any, environment: Mapping[str, str], home: Path) -> list[Finding]:
    """Whether W&B knows who logs in, where the run logs there."""
    if not logger.wandb:
        return [Finding("W&B", OK, "not needed: logger=none or another one")]
    mode = logger.mode or environment.get("WANDB_MODE") or "online"
    if mode != "online":
        return [Finding("W&B", OK, f"mode {mode}: no login is needed")]
    if environment.get("WANDB_API_KEY"):
        return [Finding("W&B", OK, "WANDB_API_KEY is set")]
    host = urlsplit(environment.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    file = Path(environment.get("NETRC") or home / ".netrc")
    try:
        known = netrc.netrc(file).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        known = False
    if known:
        return [Finding("W&B", OK, f"{file} has a login for {host}")]
    return [Finding("W&B", FAIL, f"logger=wandb, and there is no login for {host}", LOGIN)]
