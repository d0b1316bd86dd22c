"""Keys, tokens, secrets and passwords are hidden in the settings, the command and the log that a run writes down."""

import os
import re
from collections.abc import Mapping
from typing import Any, TypeVar, cast

HIDDEN = "<redacted>"  # a plain word in YAML, JSON and a shell's quotes
ENDINGS = ("KEY", "TOKEN", "SECRET", "PASSWORD")  # of the name of a setting or variable whose value is hidden
SHORTEST = 8  # characters of a secret: shorter ones are words, numbers and switches

_NAME = r"(?<![\w.-])(?:[\w.-]*[._-]key|[\w.-]*(?:token|secret|password))"
#: `name=value` anywhere, and `name: value` as a line of YAML.
_SETTING = re.compile(rf"((?:{_NAME}=|^[ -]*{_NAME}: )[\"']?)[^\s\"',;(){{}}[\]]{{{SHORTEST},}}", re.I | re.M)
_ADDRESS = re.compile(r"(://[^\s/:@'\"]*:)[^\s/@'\"]+(?=@)")

T = TypeVar("T")


def redacted(value: T) -> T:
    """The value with `HIDDEN` in place of secrets, in a text or in the texts of nested dicts and lists.

    Secrets are the values of variables of the environment and of settings whose names end in KEY, TOKEN, SECRET or
    PASSWORD, and passwords in addresses.

    >>> redacted("logger.token=swordfish sampling.max_tokens=10000000 https://me:pass@host/x")
    'logger.token=<redacted> sampling.max_tokens=10000000 https://me:<redacted>@host/x'
    >>> redacted({"api_key": "swordfish", "paths": ["s3://me:pass@host"], "seed": 1})
    {'api_key': '<redacted>', 'paths': ['s3://me:<redacted>@host'], 'seed': 1}
    """
    result: Any = value
    if isinstance(value, Mapping):
        names = {name for name, one in value.items() if isinstance(one, str) and str(name).upper().endswith(ENDINGS)}
        result = {name: HIDDEN if name in names else redacted(one) for name, one in value.items()}
    elif isinstance(value, list | tuple):
        result = [redacted(one) for one in value]
    elif isinstance(value, str):
        for name, secret in os.environ.items():
            if name.upper().endswith(ENDINGS) and len(secret) >= SHORTEST:
                result = result.replace(secret, HIDDEN)
        result = _ADDRESS.sub(rf"\1{HIDDEN}", _SETTING.sub(rf"\1{HIDDEN}", result))
    return cast("T", result)
