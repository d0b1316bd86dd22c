"""Find the program in a reply of a model."""

import ast
import re
import warnings
from collections.abc import Iterator, Sequence

NAMES = ("run_code", "get_centers", "points")  # what a program gives its set by
PARSED_BLOCKS, PARSED_CHARS = 100, 300_000  # whose syntax is looked at: a tree takes 1,000 times the memory
LINES_LOOKED_AT = 300  # behind a fence that may stand in a text of the program

_FENCE = re.compile(r"([ \t]*)(`{3,}|~{3,})(.*)")
_PYTHON = re.compile(r"[\s{.]*(?:python3?|py)(?![\w+#-]).*", re.IGNORECASE)
_MARKDOWN = re.compile(r"\s*(?:markdown|md)\b.*", re.IGNORECASE)
#: For blocks that are no Python: an error in a program is for the model to hear of, not for this module.
_DEFINED = re.compile(
    r"^(?:[ \t]*(?:async )?def (?:run_code|get_centers)\b|(?:run_code|get_centers|points)[ \t]*(?::[^=\n]*)?=(?!=))",
    re.MULTILINE,
)


def program_in(content: str) -> str | None:
    """Return the program in a reply, as it stands there; None where there is none.

    It is the last fenced block, marked as Python or not at all, that defines run_code, get_centers or points, else the
    last one that is Python. A block that uses run_code without defining it shows how the program is called, and is no
    program. A block without an end is none either: the reply was cut off.

    >>> program_in("First:\\n```python\\npoints = [[2]]\\n```\\nIt is called so:\\n```\\npoints = run_code()\\n```\\n")
    'points = [[2]]\\n'
    >>> program_in("```python\\npoints = [[2],") is None
    True
    """
    python = None
    for block in list(_blocks(content.replace("\r\n", "\n").split("\n")))[: -PARSED_BLOCKS - 1 : -1]:
        tree = _tree(block)
        if _defines(tree) if tree else _DEFINED.search(block):
            return block
        if python is None and tree is not None and tree.body:
            python = block
    return python


def _blocks(lines: Sequence[str]) -> Iterator[str]:
    """Yield the closed blocks of Python and of no stated language, without the indentation of their fences."""
    n = 0
    while n < len(lines):
        opening, n = _FENCE.fullmatch(lines[n]), n + 1
        if opening is None or _MARKDOWN.fullmatch(opening[3]) or (opening[2][0] in opening[3]):
            continue  # code within a line; and a reply that is fenced as a whole has blocks inside
        end, is_closed = _end_of_block(lines, n, opening)
        if end is None:
            return
        if is_closed and (not opening[3].strip() or _PYTHON.fullmatch(opening[3])):
            indent = re.compile(rf"^[ \t]{{1,{len(opening[1].expandtabs(4)) or 1}}}")
            body = [indent.sub("", line) for line in lines[n:end]] if opening[1] else lines[n:end]
            yield "".join(f"{line}\n" for line in body)
        n = end + is_closed


def _end_of_block(lines: Sequence[str], begin: int, opening: re.Match[str]) -> tuple[int | None, bool]:
    """Return the line of the fence that ends a block, and whether it closes it or begins another: an end was forgotten.

    A fence within a text of the program, in three quotes that are still open, ends nothing, unless no other one does.
    """
    quotes, first = 0, None
    for k in range(begin, len(lines)):
        fence = _FENCE.fullmatch(lines[k])
        if fence is None:
            quotes += lines[k].count('"""') + lines[k].count("'''")
        elif fence[2].startswith(opening[2]) and len(fence[1]) <= len(opening[1]) + 3:
            is_closed = not fence[3].strip()
            if quotes % 2 == 0 and (is_closed or _PYTHON.fullmatch(fence[3])):
                return k, is_closed
            if is_closed and first is None:
                first = k
        if first is not None and k - first > LINES_LOOKED_AT:
            break
    return first, True


def _tree(text: str) -> ast.Module | None:
    """Return the syntax tree of a text; None if it is no Python, or too large or deep."""
    if len(text) > PARSED_CHARS:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about texts of others: invalid escapes and the like
        try:
            return ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None


def _defines(tree: ast.Module) -> bool:
    """Return whether a program defines a name of the interface and uses none of its functions without defining it."""
    defined = set(_bound(tree))
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    return not defined.isdisjoint(NAMES) and not (used & {"run_code", "get_centers"}) - defined


def _bound(tree: ast.Module) -> Iterator[str]:
    """Yield the names that a module defines at its top, also under `if`, `try`, `with` and within loops."""
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.For):  # its own name is one for each step
            waiting += [*node.body, *node.orelse]
        elif not isinstance(node, ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            waiting.extend(ast.iter_child_nodes(node))
