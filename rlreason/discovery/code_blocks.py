"""Find the program in a reply of a model."""

import ast
import re
import threading
import warnings
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

#: What a program gives its set by, under the names of the interface.
NAMES = ("run_code", "get_centers", "points")
#: Characters of a block whose syntax is looked at: its tree takes up to 1,000 times the memory.
PARSED_CHARS = 300_000
FENCES = 20_000  # of a reply that are looked at: one with more repeats itself without end
PARSED_BLOCKS = 100  # that are tried, from the last one back
SKIPPED, LOOKED_AT = 8, 100  # ends of a block, and fences, at most that may stand within a text of its program

_FENCE = re.compile(r"^(?P<indent>[ \t]*)(?P<fence>`{3,}|~{3,})(?P<info>[^\n]*)$", re.MULTILINE)
_LANGUAGE = re.compile(r"[\s{.]*([\w+#-]*)")
_PYTHON = ("python", "py", "python3")
_MARKDOWN = ("markdown", "md")
_MENTIONED = re.compile(rf"\b(?:{'|'.join(NAMES)})\b")
#: For blocks that are no Python: an error in a program is for the model to hear of, not for this module.
_DEFINED = re.compile(
    r"^(?:[ \t]*(?:async[ \t]+)?def[ \t]+(?:run_code|get_centers)\b"
    r"|(?:run_code|get_centers|points)[ \t]*(?::[^=\n]*)?=(?!=))",
    re.MULTILINE,
)
_TEXT_QUOTES = re.compile(r'"""|\'\'\'')
_WARNINGS = threading.Lock()  # the filters belong to the whole process


class _Fence(NamedTuple):
    start: int  # of its line
    end: int  # of its line, without the line's end
    indent: int
    mark: str
    info: str

    @property
    def language(self) -> str:
        name = _LANGUAGE.match(self.info)
        return name[1].lower() if name else ""

    def opens(self) -> bool:
        return not (self.mark[0] == "`" and "`" in self.info)  # which is code within a line

    def may_end(self, opening: "_Fence") -> bool:
        """Return whether it ends the block of `opening`, or begins another of the same kind."""
        same = self.mark[0] == opening.mark[0] and len(self.mark) >= len(opening.mark)
        return same and self.indent <= opening.indent + 3


def program_in(content: str) -> str | None:
    """Return the program in a reply, as it stands there; None where there is none.

    It is the last fenced block, marked as Python or not at all, that defines run_code, get_centers or points, else the
    last one that is Python. A block that uses run_code without defining it shows how the program is called, and is no
    program. A block without an end is none either: the reply was cut off. Takes time in proportion to the text.

    >>> program_in("First:\\n```python\\npoints = [[2]]\\n```\\nIt is called so:\\n```\\npoints = run_code()\\n```\\n")
    'points = [[2]]\\n'
    >>> program_in("```python\\npoints = [[2],") is None
    True
    """
    blocks = [text for text in _blocks(content.replace("\r\n", "\n")) if text.strip()]
    trees: dict[int, ast.Module | None] = {}
    latest = range(len(blocks) - 1, max(-1, len(blocks) - 1 - PARSED_BLOCKS), -1)
    for n in latest:
        if _MENTIONED.search(blocks[n]):
            tree = trees[n] = _tree(blocks[n])
            if _defines(tree) if tree else _DEFINED.search(blocks[n]):
                return blocks[n]
    for n in latest:
        tree = trees[n] if n in trees else _tree(blocks[n])
        if tree is not None and tree.body:
            return blocks[n]
    return None


def _blocks(text: str) -> Iterator[str]:
    """Return the blocks of Python and of no stated language, in order, without the indentation of their fences."""
    fences = [
        _Fence(m.start(), m.end(), len(m["indent"].expandtabs(4)), m["fence"], m["info"].strip())
        for m in islice(_FENCE.finditer(text), FENCES)
    ]
    n = 0
    while n < len(fences):
        opening = fences[n]
        if not opening.opens() or opening.language in _MARKDOWN:  # a reply that is fenced as a whole has blocks inside
            n += 1
            continue
        end, begins = _end(text, fences, n)
        if end is None:
            return
        if not begins and (not opening.info or opening.language in _PYTHON):
            block = text[opening.end + 1 : fences[end].start]
            yield re.sub(rf"^[ \t]{{1,{opening.indent}}}", "", block, flags=re.MULTILINE) if opening.indent else block
        n = end if begins else end + 1


def _end(text: str, fences: list[_Fence], n: int) -> tuple[int | None, bool]:
    """Return the fence that ends the block of the `n`-th, and whether it begins another block: an end was forgotten.

    A fence within a text of the program, in three quotes that are still open, ends nothing, unless no other one does.
    """
    opening, quotes, at, skipped = fences[n], 0, fences[n].end, list[int]()
    may_quote = not opening.info or opening.language in _PYTHON
    for k in range(n + 1, len(fences)):
        fence = fences[k]
        if skipped and k - skipped[0] > LOOKED_AT:
            break
        if not fence.may_end(opening) or (fence.info and fence.language not in _PYTHON):
            continue
        if may_quote:
            quotes += len(_TEXT_QUOTES.findall(text, at, fence.start))
            at = fence.end
        if quotes % 2 == 0:
            return k, bool(fence.info)
        if not fence.info:
            skipped.append(k)
        if len(skipped) >= SKIPPED:
            break
    return (skipped[0] if skipped else None), False


def _tree(text: str) -> ast.Module | None:
    """Return the syntax tree of a text; None if it is no Python, or too large or deep."""
    if len(text) > PARSED_CHARS:
        return None
    with _WARNINGS, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about texts of others: invalid escapes and the like
        try:
            return ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None


def _defines(tree: ast.Module) -> bool:
    """Return whether a program defines a name of the interface and uses none of its functions without defining it."""
    defined = set(_bound(tree.body))
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    return not defined.isdisjoint(NAMES) and not (used & {"run_code", "get_centers"}) - defined


def _bound(body: list[ast.stmt]) -> Iterator[str]:
    """Return names that statements define at the top of a module, also under `if`, `try`, `with` and in loops."""
    waiting: list[ast.AST] = list(body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif not isinstance(node, ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            waiting.extend(ast.iter_child_nodes(node))
