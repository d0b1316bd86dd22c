"""What is asked of a model's server and what came of it, as plain data; and texts about both without the key."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult, urlsplit, urlunsplit

from rlreason.errors import ConfigError
from rlreason.runtime.secrets import HIDDEN, redacted
from rlreason.runtime.text import shorten, visible

LINE_CHARS = 300  # of a text about an answer
PATH = "/chat/completions"
_LOOKED_AT = 20_000  # characters of a text of which one line is made
_CUT = " ..."


@dataclass(frozen=True)
class Endpoint:
    """An OpenAI-compatible server, one of its models, and how the model is asked.

    `base_url` ends before /chat/completions. `temperature`, `thinking`: None sends nothing, so that the server's own
    default holds. `max_tokens`: of one reply, its thinking included. `timeout_s`: of one request, from connecting to
    the last byte. `extra`: fields of the body that are put in last: a mapping goes into the one that is there, and
    None takes a field out. `env_variable`: the environment variable that held `key`, for messages.
    """

    base_url: str
    model: str
    key: str | None = field(default=None, repr=False)
    temperature: float | None = None
    max_tokens: int = 8192
    thinking: bool | None = None
    timeout_s: float = 600.0
    extra: Mapping[str, Any] = field(default_factory=dict)
    env_variable: str = ""

    @property
    def url(self) -> str:
        """Where questions are posted. `ConfigError` where `base_url` is no web address.

        >>> Endpoint("http://127.0.0.1:8000/v1/", "m").url, Endpoint("https://host/v1?version=1", "m").url
        ('http://127.0.0.1:8000/v1/chat/completions', 'https://host/v1/chat/completions?version=1')
        """
        parts = self._parts()
        return urlunsplit(parts._replace(path=parts.path.rstrip("/") + PATH, fragment=""))

    @property
    def on_this_computer(self) -> bool:
        """Whether the server runs on this computer's loopback address, which no proxy reaches.

        >>> [Endpoint(f"http://{host}/v1", "m").on_this_computer for host in ("127.0.0.1:80", "[::1]", "host")]
        [True, True, False]
        """
        host = self._parts().hostname or ""
        return host in ("localhost", "::1") or re.fullmatch(r"127(\.\d{1,3}){3}", host) is not None

    def _parts(self) -> SplitResult:
        try:
            parts = urlsplit(self.base_url)
            port = parts.port
        except ValueError:
            parts, port = urlsplit(""), None
        if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or re.search(r"\s", self.base_url):
            raise ConfigError(f"{self._named()} is no address of a server: give one such as http://127.0.0.1:8000/v1")
        if parts.path.rstrip("/").endswith(PATH):
            raise ConfigError(f"{self._named()} names {PATH} itself: leave that away, it mostly ends in /v1")
        return parts

    def _named(self) -> str:
        return f"client.base_url={one_line(self.base_url, self.key)}"


@dataclass(frozen=True)
class Attempt:
    """What came of one request.

    `outcome`: ok | http_NNN (the server's status) | timeout | connection | empty (a reply without content) | broken
    (no JSON, or not of the shape) | interrupted (the client was stopped). `content`: the reply without its thinking;
    "" where there is none. `reasoning`: the thinking, where the server shows it. Tokens: as the server counts them,
    None where it does not say. `retry_after_s`: how long the server asks to wait, in seconds. `detail`: one line for a
    person, never with the key.
    """

    outcome: str
    content: str = ""
    reasoning: str | None = None
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    retry_after_s: float | None = None
    detail: str = ""


def without_key(text: str, key: str | None) -> str:
    """The text with this key hidden; a key of a few characters only where it stands as a word.

    >>> without_key("no such key: swordfish", "swordfish"), without_key("a bad key: a", "a")
    ('no such key: <redacted>', '<redacted> bad key: <redacted>')
    """
    key = (key or "").strip()
    if not key:
        return text
    return text.replace(key, HIDDEN) if len(key) > 5 else re.sub(rf"(?<!\w){re.escape(key)}(?!\w)", HIDDEN, text)


def one_line(text: str, key: str | None) -> str:
    """At most `LINE_CHARS` characters of a text on one line: no secret, nothing that a terminal would obey.

    >>> one_line("Incorrect API key\\n  provided: swordfish\\x1b[2J", "swordfish")
    'Incorrect API key provided: <redacted>\\\\x1b[2J'
    """
    short = " ".join(without_key(text, key)[:_LOOKED_AT].split())
    return shorten(visible(redacted(short)), LINE_CHARS - len(_CUT))
