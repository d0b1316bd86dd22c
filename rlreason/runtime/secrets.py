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
DEEPEST = 3  # quotes in quotes that are looked into
SHORTEST = 8  # characters of a secret: shorter ones are words, numbers and switches

#: How the parts of a name end that say "secret". `max_tokens`, `tokenizer` and `author` do not.
_ENDINGS = ("KEY", "TOKEN", "SECRET", "SECRETS", "PASSWORD", "PASSWD", "PASSPHRASE", "CREDENTIAL", "CREDENTIALS")
_SHORT = ("PASS", "PWD", "PAT")  # of a longer name: PWD alone is a folder
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
      | r8_[A-Za-z0-9]{30,} | npm_[A-Za-z0-9]{30,} | pypi-[A-Za-z0-9_-]{32,} | nvapi-[A-Za-z0-9_-]{20,}
      | gsk_[A-Za-z0-9]{20,} | [rs]k_(?:live|test)_[A-Za-z0-9]{16,} | hooks\.slack\.com/services/[A-Za-z0-9/]{16,}
      | local-[0-9a-f]{40} | wandb_v1_[A-Za-z0-9_]{20,}
      | eyJ[A-Za-z0-9_-]{8,1000}+\.eyJ[A-Za-z0-9_-]{8,}+\.[A-Za-z0-9_-]{8,}
      )
    """,
    re.VERBOSE | re.DOTALL,
)
# What follows takes time in proportion to the text: a name is tried where it begins, and once.
_IN_URL = re.compile(r"(?P<before>(?<![A-Za-z0-9+.-])[A-Za-z][A-Za-z0-9+.-]*+://[^\s/:@'\"]{0,200}+:)[^\s/@'\"]+(?=@)")
#: Who has no password there signs on with a token. Short ones (`git@`) are names.
_USER_IN_URL = re.compile(r"(?P<before>(?:\bhttps?://))[^\s/:@'\"?#{$][^\s/:@'\"?#]{7,}+(?=(?::[^\s/@'\"]{0,200}+)?@)")
_WANDB_LOGIN = re.compile(r"(?P<before>wandb\W{1,9}login\W{1,9})[0-9a-f]{40}")
_BEARER = re.compile(r"(?P<before>\bBearer\s{1,9})[A-Za-z0-9._~+/=-]{8,}", re.IGNORECASE)
_SCHEME = re.compile(
    r"(?P<before>\bAuthorization\W{1,9}(?:Basic|Token|Api-?Key)\s{1,9})[A-Za-z0-9._~+/=-]{8,}", re.IGNORECASE
)
_NETRC = re.compile(r"(?P<before>\blogin\s{1,9}\S{1,200}\s{1,9}(?:[+-]\s{1,9})?password\s{1,9})\S{4,}")
#: A name that may be a secret's, an equals sign or a colon, and a value: in quotes, in brackets or on the next line too
#: (of a difference, where each begins with a sign), or up to the next space.
_ASSIGNED = re.compile(
    r"""(?P<before>(?<![\w.-])
      (?=[\w.-]*(?:key|token|secret|pass(?:w|phrase|[^\w.-])|p(?:wd|at)[^\w.-]|credential|auth|webhook))
      (?P<name>-{0,3}[a-z_][\w.-]*+)(?:\\{0,3}["'])?\]?
      (?:[ \t]*+:[ \t]*+[a-z_][\w.]{0,40}(?:\[[\w., |\[\]]{0,60}\])?(?:[ ]\|[ ][\w.]{1,40}){0,3}  # a type
        (?=[ \t]*+=[ \t]*+[a-z(\[]{0,12}["'\n]))?
      [ \t]*+(?:[:?]=|=>|[:=])[ \t]*+
      (?:(?P<open>(?:(?:str|bytes|Secret(?:Str|Bytes)?)?[(\[{][ \t]*+(?:\r?\n[+ -]?[ \t]*+)?){1,2})
        | (?:\\|[|>][+-]?)\r?\n[+ -]?[ \t]*+)?
      (?:[rbfu]{1,2}(?=\\{0,3}["']))?)
    (?: (?P<triple>\"{3}|'{3})(?P<long>(?s:(?!(?P=triple)).){1,4000}+)(?:(?P=triple))?
      | (?P<quote>\\{0,3}["'])(?P<quoted>(?:(?!(?P=quote))(?:\\.|[^\\\n]))++)(?P=quote)
        (?P<more>(?(open)(?:[\s,:+-]{0,200}+[rbfu]{0,2}(?:"(?:[^"\\\n]|\\.)*+"|'(?:[^'\\\n]|\\.)*+'|\\+"[^"\n]*+"))*+))
      | (?(open)(?!)|(?P<bare>[^\s"'`,;(){}\[\]<>]{8,}+)))""",
    re.VERBOSE | re.IGNORECASE,
)
_QUOTED = re.compile(r"""(?P<quote>\\*["'])(?P<value>(?:(?!(?P=quote))(?:\\.|[^\\\n]))++)(?P=quote)""")
#: A name and the value that it is called with: `setenv("API_KEY", "...")`.
_PAIR = re.compile(
    r"""(?P<before>\((?P<first>["'])(?P<name>[\w.-]++)(?P=first),[ \t]*+)"""
    r"""(?P<quote>["'])(?P<quoted>[^"'\n]{8,}+)(?P=quote)"""
)
#: A line of a file of variables: all of it is the value, unless that is what a program asks for.
_LINE = re.compile(
    r"""^(?P<before>[+ -]?(?:export[ \t]++)?(?P<name>[A-Z_][A-Z0-9_]*+)=)
    (?!\w{1,40}\.[\w.]{1,80}[(\[]|\w{1,60}\([^()\n]{0,200}\)\s*?$)(?P<value>[^\s"'$(\[{]\S{7,}+)""",
    re.VERBOSE | re.MULTILINE,
)
#: What a name that says "secret" is given without being one: a reference to elsewhere, and code that looks it up.
_REFERENCE = re.compile(r"\$(?:\w+$|[{(])|(?:(?:Bearer|Basic|Token) )?\{[^{}]*\}$", re.IGNORECASE)
_LOOKED_UP = re.compile(r"\$|[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+$")
#: Names that mean many things in a program (a key to sort by, a token of a text): a secret of theirs holds a digit.
_OFTEN_PLAIN = re.compile(r"-*(?:.*[._-])?(?:key|token|pass|pwd|pat)s?", re.IGNORECASE)
_NEVER_PLAIN = re.compile(
    r"-*(?:.*[._-])?(?:(?:api|access|private|secret|auth|hf|wandb)[._-]?(?:key|token)s?"
    r"|(?:db|database|user|admin|root|mail|smtp|ssh|pg|mysql|redis)[._-]?(?:pass|pwd))",
    re.IGNORECASE,
)
#: A value up to the next space that has another assignment inside, such as an address.
_INSIDE = re.compile(r"(?:key|token|secret|passw|pwd|credential|auth)[\w.-]{0,20}[=:][^\s&]{8}", re.IGNORECASE)
_FLAG = re.compile(
    r"(?P<before>(?<![\w-])--?(?P<name>[A-Za-z][\w-]*+)[ \t]++)(?P<value>\"[^\"\n]{8,}\"|'[^'\n]{8,}'|[^\s-]\S{7,})"
)


def names_secret(name: str) -> bool:
    """Whether what stands under this name, of a variable, a setting or a flag, is to be kept secret.

    >>> [name for name in ("WANDB_API_KEY", "hf-token", "apiKey", "sampling.max_tokens", "GIT_AUTHOR_NAME", "AUTH")
    ...  if names_secret(name)]
    ['WANDB_API_KEY', 'hf-token', 'apiKey', 'AUTH']
    """
    name = re.sub(r"TOKEN_IDS?$", "", name.upper())
    parts = _parts(name)
    if any(part in ("AUTH", "AUTHORIZATION") or part.endswith(_ENDINGS) for part in parts):
        return True
    last = parts[-1] if parts else ""
    if last.endswith("PASS"):  # at the end alone: a pass rate is none
        return not last.endswith(("BYPASS", "COMPASS", "SURPASS", "TRESPASS"))
    return (len(parts) > 1 and last in _SHORT) or name.endswith(("WEBHOOK_URL", "WEBHOOKURL"))


def secret_values(environ: Mapping[str, str]) -> list[str]:
    """The values of the environment that are secret, longest first; a path that is there is none.

    >>> secret_values({"API_KEY": "abcdefgh-1", "DB_PASSWORD": "short", "SSH_AUTH_SOCK": "/", "HOME": "/home/user"})
    ['abcdefgh-1']
    """
    found = {
        value.strip()
        for name, value in environ.items()
        if names_secret(name) or (len(parts := _parts(name.upper())) > 1 and not {*_SHORT}.isdisjoint(parts))
    }
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
    for pattern in (_IN_URL, _USER_IN_URL, _WANDB_LOGIN, _BEARER, _SCHEME, _NETRC):
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
    """The YAML text of settings without secrets, as it is where it holds none; it reads back with the same names.

    The settings are looked at as they are read, since YAML breaks a long text into lines wherever it has a space.
    """
    import yaml  # slow to load, and needed here alone

    settings = yaml.safe_load(text)
    plain = redacted_leaves(settings, environ)
    if plain == settings and plainly_redacted(text, environ) == text:
        return text
    return str(yaml.safe_dump(plain, sort_keys=False, allow_unicode=True))


_BETWEEN = r"(?:[ \t]{0,99}\r?\n|\\n)[\s+-]{0,99}"  # two lines of a secret


@lru_cache(maxsize=8)  # the environment rarely changes, and a log asks for every line
def _known(values: tuple[str, ...]) -> re.Pattern[str] | None:
    # A secret of several lines may stand in a difference, be indented, or be written as JSON.
    lines = [[re.escape(line.strip()) for line in value.splitlines() if line.strip()] for value in values]
    return re.compile("|".join(_BETWEEN.join(parts) for parts in lines)) if values else None


def _parts(name: str) -> list[str]:
    return [part for part in re.split(r"[^A-Z0-9]+", name) if part]


def _assignments_hidden(text: str) -> str:
    text = _LINE.sub(lambda m: _value_hidden(m, m["value"]), text)
    text = _PAIR.sub(lambda m: _value_hidden(m, m["quoted"], m["quote"]), _ASSIGNED.sub(_assigned, text))
    return _FLAG.sub(lambda m: _value_hidden(m, m["value"], certain=True), text)


def _assigned(found: re.Match[str], inside: int = 0) -> str:
    """`inside`: how many quotes it stands in."""
    name, before = found["name"], found["before"]
    if found["bare"]:
        value, calls = found["bare"], found.string[found.end() : found.end() + 1] in ("(", "[")
        secret = not calls and (_is_secret(name, value) or bool(_INSIDE.search(value)))
        return f"{before}{HIDDEN}" if secret and HIDDEN not in value else found[0]
    if found["triple"]:
        ended = found["triple"] if found[0].endswith(found["triple"]) else ""
        return f"{before}{found['triple']}{_long_hidden(name, found['long'])}{ended}"
    certain = name.isupper() and before.rstrip(" =").endswith("]")  # a variable of the environment

    def hidden(one: re.Match[str]) -> str:
        if _is_secret(name, one["value"], quoted=True, certain=certain):
            return f"{one['quote']}{HIDDEN}{one['quote']}"
        if inside == DEEPEST:
            return one[0]
        return f"{one['quote']}{_ASSIGNED.sub(lambda m: _assigned(m, inside + 1), one['value'])}{one['quote']}"

    return before + _QUOTED.sub(hidden, found[0][len(before) :])


def _long_hidden(name: str, text: str) -> str:
    """A text of several lines, of which the signs of a difference stay."""
    if "\n" not in text:
        return HIDDEN if _is_secret(name, text, quoted=True) else text
    if not _is_secret(name, text, quoted=True, certain=True):
        return text
    first, *others = text.split("\n")
    return "\n".join(
        [HIDDEN if first else "", *(f"{line[:1] if line[:1] in '+- ' else ''}{HIDDEN}" for line in others)]
    )


def _value_hidden(found: re.Match[str], value: str, quote: str = "", certain: bool = False) -> str:
    """What is found, its value hidden where its name says so; `certain`: of a flag, which sorts by no key."""
    secret = _is_secret(found["name"], value, quoted=bool(quote), certain=certain)
    return f"{found['before']}{quote}{HIDDEN}{quote}" if secret else found[0]


def _is_secret(name: str, value: str, quoted: bool = False, certain: bool = False) -> bool:
    """Whether a value is to be hidden that stands behind this name; a list of several has a name in the plural."""
    several = quoted and not names_secret(name) and name[-1:] in "sS" and names_secret(name[:-1])
    if not several and not names_secret(name):
        return False
    if len(value) < SHORTEST or HIDDEN in value or (_REFERENCE if quoted else _LOOKED_UP).match(value):
        return False
    certain |= bool(_NEVER_PLAIN.fullmatch(name)) or (name.isupper() and not quoted)
    if certain or not _OFTEN_PLAIN.fullmatch(name):
        return True
    return " " not in value and bool(re.search(r"\d", value)) and not (several and value.isdigit())
