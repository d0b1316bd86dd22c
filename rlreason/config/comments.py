"""What a setting is for: the comment behind its field in the source, or on the lines above it."""

import ast
import inspect
import textwrap
from dataclasses import is_dataclass
from functools import cache


def comment(kind: type, name: str) -> str:
    """The comment on a field of a dataclass, in the words of the first class that has some; empty where none has.

    >>> from rlreason.config.groups import SamplingConfig
    >>> comment(SamplingConfig, "max_tokens")
    'a response is cut here'
    """
    said = (_comments(base).get(name, "") for base in reversed(kind.__mro__) if is_dataclass(base))
    return next(filter(None, said), "")


@cache
def _comments(kind: type) -> dict[str, str]:
    try:
        lines = textwrap.dedent(inspect.getsource(kind)).splitlines()
    except OSError:  # made by a call
        return {}
    found = {}
    for node in ast.walk(ast.parse("\n".join(lines))):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.end_lineno:
            said = lines[node.end_lineno - 1].encode()[node.end_col_offset :].decode().partition("# ")[2]
            above = node.lineno - 2
            while lines[above].lstrip().startswith("# "):
                said = f"{lines[above].lstrip('# ')} {said}"
                above -= 1
            found[node.target.id] = said.strip()
    return found
