"""Which program of a reply is meant, over many shapes of replies, and that none of them takes long."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlreason.discovery.client import program_in

RUN = "def run_code():\n    return [[2]]\n"
OLD = "def run_code():\n    return [[1]]\n"
CENTERS = "def get_centers():\n    return [[2]]\n"
POINTS = "points = [[2]]\n"
HELPER = "def helper():\n    return 3\n"


def fenced(code, info="python", fence="```"):
    """A block of Markdown."""
    return f"{fence}{info}\n{code}{fence}\n"


@pytest.mark.parametrize("program", [RUN, CENTERS, POINTS, "points: list = [[2]]\n", "run_code = lambda: [[2]]\n"])
@pytest.mark.parametrize("info", ["", "python", "py", "python3", "Python", " python title='a.py'", "{.python}", "py3"])
def test_a_block_marked_as_python_or_not_at_all_is_the_program(program, info):
    for fence in ("```", "````", "~~~", "~~~~~"):
        found = program_in(f"Here it is:\n\n{fenced(program, info, fence)}\nIt works.")
        assert found == (None if info == "py3" else program)


@pytest.mark.parametrize("program", [RUN, CENTERS, POINTS])
def test_the_last_block_that_defines_the_set_is_taken(program):
    after = [
        fenced(HELPER),
        fenced("22\n", ""),
        fenced("pip install numpy\n", "bash"),
        fenced('{"points": 3}\n', "json"),
        fenced("points = run_code()\nprint(len(points))\n"),
        fenced("from program import run_code\npoints = run_code()\n"),
        "It defines run_code and `points`, in ``` marks.\n",
        "```inline``` and ```python too``` are no blocks\n",
        "",
    ]
    for text in after:
        assert program_in(f"{fenced(OLD)}then\n{fenced(program)}{text}") == program


def test_a_program_with_a_mistake_is_still_the_program():
    broken = "def run_code():\n    return [[2]\n"
    assert program_in(fenced(HELPER) + fenced(broken)) == broken
    assert program_in(fenced(broken) + fenced(HELPER)) == broken
    assert program_in(fenced("points = [[2]\n")) == "points = [[2]\n"
    assert program_in(fenced("x = (\npoints = [[2]\n")) == "x = (\npoints = [[2]\n"


@pytest.mark.parametrize(
    "program",
    [
        "def run_code():\n    print('get_centers() is slow')\n    return [[2]]\n",
        "def run_code():\n    return solver.get_centers()\n",
        "result = points = [[2]]\n",
        "points, d = [[2]], 1\n",
        "if (points := [[2]]):\n    pass\n",
        "try:\n    import numpy\n    def run_code():\n        return [[2]]\nexcept ImportError:\n    pass\n",
    ],
)
@pytest.mark.parametrize(
    "after",
    [
        "x = 1\n",
        "f = run_code\n",
        "class A:\n    def run_code(self):\n        return 1\n",
        "s = '''\ndef run_code():\n    pass\n'''\n",
        "def helper():\n    points = []\n    return points\n",
        "show(\npoints=[1],\n)\n",
        "assert all(points for points in run_code())\n",
    ],
)
def test_syntax_decides_what_a_block_defines(program, after):
    assert program_in(fenced(program) + fenced(after)) == program


def test_without_such_a_block_the_last_one_of_python_is_taken():
    assert program_in(fenced(HELPER) + fenced("a set of 22 points\n", "")) == HELPER
    assert program_in(fenced(HELPER) + fenced("# nothing\n") + fenced("\n")) == HELPER
    assert program_in(fenced(HELPER) + fenced("let x = 1;\n", "javascript")) == HELPER


@pytest.mark.parametrize(
    "content",
    [
        "",
        "def run_code(): return [[2]]",
        "I would write run_code, get_centers or points.",
        "```python\ndef run_code():\n    return [[2]]",
        "```python\ndef run_code():\n    return [[2]]\n``",
        "````python\ndef run_code():\n    return [[2]]\n```\n",
        "```python\ndef run_code():\n    return [[2]]\n~~~\n",
        fenced(RUN, "javascript"),
        fenced("", ""),
        fenced("22 points\n", ""),
        "`````",
        "~~~",
    ],
)
def test_a_reply_without_a_whole_program_has_none(content):
    assert program_in(content) is None


def test_indented_blocks_lose_the_indentation_of_their_fences():
    text = f"1. First:\n\n   ```python\n{''.join(f'   {line}' for line in RUN.splitlines(True))}   ```\n2. Then run it."
    assert program_in(text) == RUN
    assert program_in(text.replace("   ", "\t", 2).replace("\n", "\r\n")) is not None
    assert program_in(fenced(RUN).replace("\n", "\r\n")) == RUN


def test_a_reply_that_is_fenced_as_a_whole_has_its_blocks_inside():
    assert program_in(f"````markdown\n# Report\n{fenced(RUN)}````\n") == RUN
    assert program_in(f"```markdown\n# Report\n{fenced(RUN)}```\n") == RUN


def test_a_forgotten_end_costs_that_block_alone():
    assert program_in(f"```python\n{OLD}I correct it:\n{fenced(RUN)}") == RUN
    assert program_in(f"```text\nnotes\n{fenced(RUN)}") == RUN
    assert program_in(f"{fenced(RUN)}```\n{fenced(POINTS)}") == POINTS
    assert program_in(f"{fenced(RUN)}and\n```python\nfor i in") == RUN


@pytest.mark.long
@pytest.mark.parametrize(
    "hostile",
    [
        "`" * 2_000_000,
        "```\n" * 500_000,
        "```python\n" * 200_000,
        "~~~\n```\n" * 250_000,
        (" " * 1000 + "```\n") * 2000,
        "```python\n)\n```\n" * 120_000,
        "```python\nrun_code" + ".a" * 100_000 + "\n```\n",
        "```python\nrun_code = " + "[" * 200_000 + "\n```\n",
        "".join(f"{'`' * n}python\n'''\n{'`' * n}\n" for n in range(1200, 3, -1)) + "```x\n" * 100_000,
        "```python\npoints " + ": " * 900_000 + "\n```\n",
        "```python\n" + "points: " * 200_000 + "\n```\n",
        "```python\n\0\n```\n" * 100_000,
    ],
    ids=range(12),
)
def test_hostile_replies_take_time_in_proportion_to_their_length(hostile):
    began = time.process_time()
    program_in(hostile)
    assert time.process_time() - began < 3
    began = time.process_time()
    assert program_in(f"{hostile}\n\n```````\n\n~~~~~~~\n") is not False
    assert time.process_time() - began < 3


def test_reading_a_program_changes_no_filters_of_warnings(recwarn):
    assert program_in(fenced('x = "\\d" is 3\n' + RUN)) is not None
    assert not recwarn.list


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from(["```", "~~~", "````", "python", "text", "\n", " ", '"""', "'", RUN, POINTS, "x", "\r\n"]))
)
def test_any_reply_gives_a_block_of_its_own_or_none(pieces):
    content = "".join(pieces)
    found = program_in(content)
    if found is not None:
        assert found.strip()
        assert all(line.strip() in content for line in found.splitlines())
        assert "```" in content or "~~~" in content
    whole = program_in(f"{content}\n\n# `````\n\n`````` \n``````\n{fenced(RUN, fence='```````')}")
    assert whole is None or any(name in whole for name in ("run_code", "get_centers", "points")) or found
