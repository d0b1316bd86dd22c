"""Passwords, keys and tokens are hidden in what a run writes down: texts, command lines and settings.

What counts as one: the values of variables of the environment whose names say so, texts of well-known shapes, and what
a program or a command line gives to a name that says so. Hiding too much costs a reader a word; hiding too little
cannot be undone once a run folder was shared.
"""

import os
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

HIDDEN = "<redacted>"  # a plain word in YAML, JSON and a shell's quotes
SHORTEST = 8  # characters of a secret: shorter ones are words, numbers and switches

#: How the parts of a name end that say "secret". `max_tokens`, `tokenizer` and `author` do not.
_ENDINGS = ("KEY", "TOKEN", "SECRET", "SECRETS", "PASSWORD", "PASSWD", "PASSPHRASE", "CREDENTIAL", "CREDENTIALS")
_SHAPES = re.compile(
    r"""-----BEGIN[ ][A-Z0-9 ]*PRIVATE[ ]KEY-----
        (?: .{0,8000}?-----END[ ][A-Z0-9 ]*PRIVATE[ ]KEY----- | [\s+\-A-Za-z0-9/=]* )
    | (?<![A-Za-z0-9]) (?:
        hf_[A-Za-z0-9]{20,}
      | sk-[A-Za-z0-9_-]{20,}
      | gh[pousr]_[A-Za-z0-9]{20,} | github_pat_[A-Za-z0-9_]{20,}
      | (?:AKIA|ASIA)[0-9A-Z]{16}(?![A-Za-z0-9])
      | AIza[0-9A-Za-z_-]{35}
      | xox[abeoprs]-[A-Za-z0-9-]{10,}
      | glpat-[A-Za-z0-9_-]{16,}
      | local-[0-9a-f]{40} | wandb_v1_[A-Za-z0-9_]{20,}
      | eyJ[A-Za-z0-9_-]{8,1000}+\.eyJ[A-Za-z0-9_-]{8,}+\.[A-Za-z0-9_-]{8,}
      )
    """,
    re.VERBOSE | re.DOTALL,
)
# What follows takes time in proportion to the text: a name is tried where it begins, and once.
_IN_URL = re.compile(r"(?P<before>(?<![A-Za-z0-9+.-])[A-Za-z][A-Za-z0-9+.-]*+://[^\s/:@'\"]{0,200}+:)[^\s/@'\"]+(?=@)")
_WANDB_LOGIN = re.compile(r"(?P<before>wandb\W{1,9}login\W{1,9})[0-9a-f]{40}")
_BEARER = re.compile(r"(?P<before>\bBearer\s{1,9})[A-Za-z0-9._~+/=-]{8,}", re.IGNORECASE)
#: A name that may be a secret's, an equals sign or a colon, and a value in quotes or up to the next space.
_ASSIGNED = re.compile(
    r"""(?P<before>(?<![\w.-])(?=[\w.-]*(?:key|token|secret|passw|passphrase|credential|auth))
    (?P<name>-{0,3}[a-z_][\w.-]*+)["']?[ \t]*+(?::=|[:=])[ \t]*+)
    (?:(?P<quote>["'])(?P<quoted>[^"'\n]{8,})(?P=quote) | (?P<bare>[^\s"'`,;(){}\[\]<>]{8,}+))""",
    re.VERBOSE | re.IGNORECASE,
)
#: What a name that says "secret" is given without being one: code that looks it up, and a reference to elsewhere.
_NO_VALUE = re.compile(r"\$|[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+$")
#: Names that mean many things in a program (a key to sort by, a token of a text): a secret of theirs holds a digit.
_OFTEN_PLAIN = re.compile(r"-*(?:.*[._-])?(?:key|token)", re.IGNORECASE)
_NEVER_PLAIN = re.compile(
    r"-*(?:.*[._-])?(?:api|access|private|secret|auth|hf|wandb)[._-]?(?:key|token)", re.IGNORECASE
)
_FLAG = re.compile(r"(?P<before>(?<![\w-])--?(?P<name>[A-Za-z][\w-]*+)[ \t]++)(?P<value>[^\s-]\S{7,})")


def names_secret(name: str) -> bool:
    """Whether what stands under this name, of a variable, a setting or a flag, is to be kept secret.

    >>> [name for name in ("WANDB_API_KEY", "hf-token", "apiKey", "sampling.max_tokens", "GIT_AUTHOR_NAME", "AUTH")
    ...  if names_secret(name)]
    ['WANDB_API_KEY', 'hf-token', 'apiKey', 'AUTH']
    """
    parts = re.split(r"[^A-Z0-9]+", re.sub(r"TOKEN_IDS?$", "", name.upper()))
    return any(part == "AUTH" or part.endswith(_ENDINGS) for part in parts)


def secret_values(environ: Mapping[str, str]) -> list[str]:
    """The values of the environment that are secret, longest first; a path that is there is none.

    >>> secret_values({"API_KEY": "abcdefgh-1", "DB_PASSWORD": "short", "SSH_AUTH_SOCK": "/", "HOME": "/home/user"})
    ['abcdefgh-1']
    """
    found = {value.strip() for name, value in environ.items() if names_secret(name)}
    secret = {v for v in found if len(v) >= SHORTEST and not (v.startswith("/") and os.path.exists(v))}
    return sorted(secret, key=lambda value: (-len(value), value))


def redacted(text: str, environ: Mapping[str, str] | None = None) -> str:
    """The text with every secret replaced by `HIDDEN`: a program's source, a difference, an error message.

    `environ`: whose secret values are known; None: this process's.

    >>> redacted('api_key = "swordfish1"; url = "https://me:pass@host/x"', {})
    'api_key = "<redacted>"; url = "https://me:<redacted>@host/x"'
    """
    return _assignments_hidden(plainly_redacted(text, environ))


def plainly_redacted(text: str, environ: Mapping[str, str] | None = None) -> str:
    """The text without known values and texts of known shapes; names and what they are given are left alone.

    For what must still be read back, such as settings, and for what is written all the time, such as a log.

    >>> plainly_redacted("token: swordfish1, hf_" + 30 * "a", {"MY_TOKEN": "swordfish1"})
    'token: <redacted>, <redacted>'
    """
    if known := _known(tuple(secret_values(os.environ if environ is None else environ))):
        text = known.sub(HIDDEN, text)
    text = _SHAPES.sub(HIDDEN, text)
    for pattern in (_IN_URL, _WANDB_LOGIN, _BEARER):
        text = pattern.sub(rf"\g<before>{HIDDEN}", text)
    return text


def redacted_words(words: Sequence[str], environ: Mapping[str, str] | None = None) -> list[str]:
    """The words of a command line, each as a shell hands it over, with the values of secret settings and flags hidden.

    >>> redacted_words(["logger.api_key=swordfish1", "--token", "swordfish2", "sampling.max_tokens=10000000"], {})
    ['logger.api_key=<redacted>', '--token', '<redacted>', 'sampling.max_tokens=10000000']
    """
    found, before = list[str](), ""
    for word in words:
        name, equals, value = word.partition("=")
        if equals and names_secret(name) and len(value) >= SHORTEST:
            word = f"{name}={HIDDEN}"
        elif before.startswith("-") and "=" not in before and names_secret(before) and len(word) >= SHORTEST:
            word = HIDDEN
        found.append(plainly_redacted(word, environ))
        before = word
    return found


def redacted_leaves(node: Any, environ: Mapping[str, str] | None = None) -> Any:
    """Nested dicts and lists with the secrets in their texts hidden; names stay, as do values that are no text.

    >>> redacted_leaves({"path": "s3://key:swordfish@host", "seed": 1}, {})
    {'path': 's3://key:<redacted>@host', 'seed': 1}
    """
    if isinstance(node, Mapping):
        return {key: redacted_leaves(value, environ) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [redacted_leaves(value, environ) for value in node]
    return plainly_redacted(node, environ) if isinstance(node, str) else node


def redacted_settings(text: str, environ: Mapping[str, str] | None = None) -> str:
    """The YAML text of settings without secrets, as it is where it holds none; it reads back with the same names."""
    if plainly_redacted(text, environ) == text:
        return text
    import yaml  # slow to load, and needed here alone

    plain = redacted_leaves(yaml.safe_load(text), environ)
    return str(yaml.safe_dump(plain, sort_keys=False, allow_unicode=True))


@lru_cache(maxsize=8)  # the environment rarely changes, and a log asks for every line
def _known(values: tuple[str, ...]) -> re.Pattern[str] | None:
    return re.compile("|".join(map(re.escape, values))) if values else None


def _assignments_hidden(text: str) -> str:
    text = _ASSIGNED.sub(lambda m: _hidden(m, m["quoted"] or m["bare"], m["quote"] or ""), text)
    return _FLAG.sub(lambda m: _hidden(m, m["value"], "", certain=True), text)


def _hidden(found: re.Match[str], value: str, quote: str, certain: bool = False) -> str:
    """What is found, its value hidden where its name says so; `certain`: of a flag, which sorts by no key."""
    name, calls = found["name"], found.string[found.end() : found.end() + 1] in ("(", "[")
    if not names_secret(name) or HIDDEN in value or _NO_VALUE.match(value) or (calls and not quote):
        return found[0]
    certain |= bool(_NEVER_PLAIN.fullmatch(name)) or (name.isupper() and not quote)
    if not certain and _OFTEN_PLAIN.fullmatch(name) and (" " in value or not re.search(r"\d", value)):
        return found[0]
    return f"{found['before']}{quote}{HIDDEN}{quote}"
