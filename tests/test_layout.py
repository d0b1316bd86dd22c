"""Limits for the whole package: its size, how long modules and functions are, what its map names."""

import ast
import io
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOKENS = 254_800  # of code in rlreason/; it only falls, or is raised with a reason in CHANGELOG.md
MODULES = 165
TOP_LEVEL_FILES = 10
FUNCTION_LINES = 80
FILE_LINES = {"rlreason/training/trainer.py": 200}  # 500 for all others

FILES = {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in sorted(ROOT.glob("rlreason/**/*.py"))}
Function = ast.FunctionDef | ast.AsyncFunctionDef
LAYOUT = {getattr(tokenize, kind) for kind in ("COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER")}


def tokens_of(text: str) -> int:
    """Count a module's tokens of code, without comments, docstrings and layout.

    >>> tokens_of('"What it is."\\nx = 1  # one')
    3
    """
    documented = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Module | ast.ClassDef | Function)]
    docstrings = {(n.body[0].lineno, n.body[0].col_offset) for n in documented if ast.get_docstring(n)}
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(t.type not in LAYOUT and not (t.type == tokenize.STRING and t.start in docstrings) for t in tokens)


def test_the_package_does_not_grow():
    assert sum(map(tokens_of, FILES.values())) <= TOKENS, "shorten, or raise TOKENS with a reason in CHANGELOG.md"
    assert sum(bool(text) for text in FILES.values()) <= MODULES


def test_few_files_lie_at_the_top():
    """Bug: a file that belongs to a package lies in rlreason/ itself."""
    assert sum(path.count("/") == 1 for path in FILES) <= TOP_LEVEL_FILES


def test_modules_and_functions_can_be_read_in_one_sitting():
    long = [path for path, text in FILES.items() if text.count("\n") > FILE_LINES.get(path, 500)]
    long += [
        f"{path}:{node.lineno}: {node.name}"
        for path, text in FILES.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, Function) and "/courses/" not in path  # which shows the handouts' own
        if (node.end_lineno or 0) - node.lineno + 1 > FUNCTION_LINES
    ]
    assert not long, "split each where its subject changes"


def test_the_architecture_page_names_every_package():
    page = (ROOT / "docs/architecture.md").read_text("utf-8")
    packages = {path.parent.name for path in ROOT.glob("rlreason/*/__init__.py")}
    assert {name for name in packages if f"{name}/" not in page} == set()


CLOCKS = {"monotonic", "perf_counter", "process_time", "ru_utime", "ru_maxrss", "memory_info"}


def test_no_default_test_measures_time_or_memory():
    """A machine that has something else to do would fail it. The tests of the clock itself hold sums and bounds."""
    measuring = []
    for path in sorted(set(ROOT.glob("tests/test_*.py")) - {ROOT / "tests/test_clock.py"}):
        tree = ast.parse(path.read_text("utf-8"))
        marks = [ast.unparse(n) for n in tree.body if isinstance(n, ast.Assign) and "pytestmark" in ast.unparse(n)]
        for test in (n for n in tree.body if isinstance(n, Function) and n.name.startswith("test_")):
            if any("pytest.mark.long" in mark for mark in [*map(ast.unparse, test.decorator_list), *marks]):
                continue
            read = {node.attr for node in ast.walk(test) if isinstance(node, ast.Attribute)}
            measuring += [f"{path.name}: {test.name} reads {name}" for name in sorted(read & CLOCKS)]
    assert not measuring, "wait for a state, use a fake clock, or mark the test as long"
