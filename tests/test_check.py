"""`rlreason check`: right implementations raise no alarm; planted bugs are refused with their function and kind."""

import inspect
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
import yaml

from rlreason.courses import cs336_2025, cs336_2026
from rlreason.courses.check.calling import first_difference
from rlreason.courses.check.functions import SUBJECTS, examine
from rlreason.courses.check.mistakes import MISTAKES, NO_MISTAKE
from rlreason.courses.check.runner import LOOP, course_of, findings_of, functions_of
from tests import right_functions_2025, right_functions_2026, right_loop, right_loop_left_padded, right_odd
from tests.some import some
from tests.starts import subcommand

HERE, ROOT = Path(__file__).parent, Path(__file__).resolve().parents[1]
CHANGES = yaml.safe_load((HERE / "planted_bugs.yaml").read_text("utf-8"))
OF_LOOPS = ("step", "score", "response", "share", "old", "groups")  # planted bugs show these
OF_FUNCTIONS = [mistake for mistake in MISTAKES if mistake.step not in OF_LOOPS]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def module_of(text, name="planted"):
    module = ModuleType(name)
    exec(compile(text, f"{name}.py", "exec"), module.__dict__)
    return module


def planted(change):
    """The right file of a change as a module that has it."""
    text = (HERE / change["file"]).read_text("utf-8")
    assert change["old"] in text
    return module_of(text.replace(change["old"], change["new"]))


def name_of(change):
    return f"{change['function']}-{change['new'].strip()[:30]}"


def found_in(module, name):
    functions = functions_of(module)
    return findings_of(name, functions[name], course_of(functions))


@pytest.mark.parametrize(
    "module",
    [
        cs336_2025, cs336_2026, right_functions_2025, right_functions_2026, right_loop, right_loop_left_padded,
        right_odd, module_of((ROOT / "examples/own_loop.py").read_text("utf-8"), "own_loop"),
    ],
    ids=lambda module: module.__name__.rpartition(".")[2],
)  # fmt: skip
def test_a_right_implementation_raises_no_alarm(module):
    for name in functions_of(module):
        assert found_in(module, name)[:2] == ("ok", [])


@pytest.mark.parametrize("variant", some(CHANGES["right"], 4), ids=name_of)
def test_another_right_way_raises_no_alarm(variant):
    state, _, notes = found_in(planted(variant), variant["function"])
    assert state == "ok"
    assert not variant["words"] or any(variant["words"] in note for note in notes), notes


@pytest.mark.parametrize("body", ["raise NotImplementedError", "pass"])
def test_what_nobody_has_written_yet_is_no_bug(body):
    text = "".join(
        f"def {name}{inspect.signature(function)}:\n    {body}\n\n"
        for name, function in functions_of(right_functions_2026).items()
    )
    module = module_of(text + f"def train_grpo(generate, **rest):\n    {body}\n")
    for name in functions_of(module):
        assert found_in(module, name)[0] == "not written"


def test_a_case_that_nobody_has_written_and_other_parameters_are_bugs():
    """Bug: a function with one case to write counts as not written, and wrong parameters as an error in its body."""
    at = "    if dim is None:\n        raise NotImplementedError\n    return mask.sum()\n"
    for text, kind in ((f"(tensor, mask, dim=None):\n{at}", "an error"), ("(tensor):\n    return 1\n", "do not fit")):
        state, (bug,), _ = found_in(module_of(f"def masked_mean{text}"), "masked_mean")
        assert (state, kind in bug["kind"]) == ("bug", True)


PLANTED = some([bug for bug in CHANGES["bugs"] if bug["function"] == LOOP], 4)
PLANTED += some([bug for bug in CHANGES["bugs"] if bug["function"] != LOOP], 8)


@pytest.mark.parametrize("bug", PLANTED, ids=name_of)
def test_a_planted_bug_is_named(bug):
    _, (found,), _ = found_in(planted(bug), bug["function"])
    assert bug["words"] in found["kind"]
    assert found["where"]


def differs(subject, case, mistake):
    try:
        wrong = subject.observe(lambda **inputs: subject.wrong(inputs, mistake), case.inputs)
    except Exception:  # a mistake may make nonsense of a case
        return True
    return first_difference(wrong, subject.observe(subject.ours, case.inputs)) != ""


@pytest.mark.parametrize("mistake", some(OF_FUNCTIONS, 12), ids=lambda mistake: mistake.kind[0][:40])
def test_a_known_mistake_is_named_where_it_shows(mistake):
    """One that no case shows, or that always has another's results, would never be named."""
    subjects = [subject for subject in SUBJECTS if any(differs(subject, case, mistake) for case in subject.cases())]
    found = [examine(subject, lambda _of=subject, **inputs: _of.wrong(inputs, mistake)) for subject in subjects]
    assert mistake.kind[0] in [bug.kind for bugs in found for bug in bugs]
    assert all(found)


def test_the_steps_without_a_mistake_are_right():
    """Every mistake would be told from something else than the right results."""
    for subject in SUBJECTS:
        assert not any(differs(subject, case, NO_MISTAKE) for case in subject.cases())


HOSTILE = """
import os, time

time.sleep(6)  # longer than a function may take, which an import is not counted in

def compute_entropy(logits):
    print("noise", flush=True)
    os._exit(7)

def masked_mean(tensor, mask, dim=None):
    while True:
        try:
            time.sleep(0.1)
        except BaseException:
            pass
"""


@pytest.mark.long
def test_exits_hangs_and_noise_are_findings_and_the_rest_is_checked(tmp_path, capfd):
    (tmp_path / "hostile.py").write_text(HOSTILE)
    assert subcommand("check", tmp_path / "hostile.py", "--timeout", "5", "--json") == 1
    figures = json.loads(capfd.readouterr().out)  # what the functions print is not among it
    kinds = {finding["function"]: finding["kind"] for finding in figures["findings"]}
    assert "exit code 7" in kinds["compute_entropy"]
    assert "does not end" in kinds["masked_mean"]
    assert figures["functions"] == {"compute_entropy": "bug", "masked_mean": "bug"}


def test_adapters_and_relative_files_are_found_and_a_bug_is_shown_with_its_line(tmp_path, monkeypatch, capsys):
    """The library that an error came through is not the line that is named."""
    (tmp_path / "mine.py").write_text((ROOT / "tests/right_functions_2025.py").read_text())
    (tmp_path / "tests").mkdir()
    adapters = "import mine\n\ndef run_masked_mean(*given):\n    return mine.masked_mean(*given)\n\n"
    adapters += "def run_compute_entropy(logits):\n    return logits.view(-1).reshape(3, 1000, 7)\n"
    (tmp_path / "tests/adapters.py").write_text(adapters)
    monkeypatch.chdir(tmp_path)
    assert subcommand("check", "tests/adapters.py") == 1
    printed = capsys.readouterr().out
    assert "masked_mean      ok" in printed
    assert "BUG in compute_entropy" in printed
    assert "adapters.py, line 7)" in printed
