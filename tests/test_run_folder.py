"""One reader of the run folder for every command: broken lines, unfinished runs, other versions; names in one place."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import rlreason
from rlreason.errors import ConfigError
from rlreason.records import files
from rlreason.records.files import opened
from rlreason.records.reader import RunFolder, runs_in, write_status
from rlreason.records.rows import TO_LEARN, TO_SHOW, lacks, sample_of
from rlreason.records.writer import RunWriter
from rlreason.types import Grade, Problem, Response, Sample
from tests.run_records import append
from tests.test_subcommands import subcommand

PACKAGE = Path(rlreason.__file__).parent
PROBLEM = Problem("p", "How many?", "7")
BROKEN = {
    b'{"step": 1, "resp': "half a line",
    b"not json\n": "not JSON",
    b"[1, 2]\n": "not a JSON object",
    b'{"outcome": "correct", "gold": "7", "train/loss": "low"}\n': "no",  # keys are missing, and a value is no number
    b"\0\0\0\0\n": "NUL bytes",
    b'{"response": "\xff"}\n': "not UTF-8",
    b"[" * 100_000 + b"\n": "maximum recursion depth",
}


@pytest.fixture
def run(tmp_path):
    """A run that is under way: settings, two rows of metrics, a step of rollouts and an evaluation; no summary."""
    folder = tmp_path / "run"
    records = RunWriter(folder, "algorithm: grpo\nprompt: {reward: r1_zero}\nmodel: {name: m}\nseed: 0\n")
    records.metrics({"train_step": 0, "eval_step": 1, "eval/accuracy": 0.5})
    records.metrics({"train_step": 1, "eval_step": 1, "reward/mean": 0.5})
    response = Response("p", [5], [1], [-0.5], "</think> <answer>7</answer>", "stop")
    for kind in (files.ROLLOUTS, files.EVALS):
        records.responses(kind, 1, [Sample(response, Grade(1.0, 1.0, 1.0, "correct"))], [PROBLEM])
    return folder


@pytest.mark.parametrize(("line", "says"), BROKEN.items(), ids=BROKEN.values())
def test_a_broken_line_is_named_once_and_the_others_are_read(run, line, says):
    said = list[str]()
    folder = RunFolder(run, said.append)
    responses = folder.rollouts()[0]
    for path, read in (
        (run / "metrics.jsonl", lambda: len(folder.metrics) - 1),
        (responses.path, lambda: len(folder.rows(responses, TO_SHOW))),
    ):
        append(path, line)
        assert read() == read() == 1
        number = len(opened(path).read().strip(b"\n").split(b"\n"))
        assert said.pop().startswith(f"{path}: left out line {number} ({says}")
        assert not said


def test_every_command_goes_on_behind_broken_lines(run, capsys):
    broken = {
        ("curves",): run / "metrics.jsonl",
        ("inspect", "--regrade"): run / "rollouts/step_00001.jsonl.gz",
        ("inspect",): run / "evals/step_00001.jsonl.gz",
    }
    for (name, *options), path in broken.items():
        append(path, b"".join(sorted(BROKEN, key=lambda line: line[-1:] != b"\n")))
        assert subcommand(name, run, *options) == 0
        told = [text for text in capsys.readouterr().err.splitlines() if "left out" in text]
        assert [text.startswith(f"rlreason: {path}: left out line ") for text in told] == [True]


def test_many_broken_lines_are_one_line(run):
    said = list[str]()
    with (run / "metrics.jsonl").open("a") as file:
        file.write("x\n" * 1000)
    folder = RunFolder(run, said.append)
    assert [row["train_step"] for row in folder.metrics] == [0, 1]
    assert folder.metrics is folder.metrics
    where = "3 (not JSON), 4 (not JSON), 5 (not JSON) and 997 more"
    assert said == [f"{run / 'metrics.jsonl'}: left out line {where}"]


def test_an_unfinished_run_has_no_summary_and_no_model(run):
    folder = RunFolder(run)
    assert (folder.status, folder.summary, folder.model) == ("running", None, None)
    assert folder.setting("model.name") == "m"
    assert [file.step for file in folder.rollouts()] == [1]
    assert folder.setting("model.nothing.there") is None


def test_whole_files_that_are_broken_are_named_and_count_as_not_there(run):
    said = list[str]()
    for name in ("summary.json", "provenance.json", "status.json"):
        (run / name).write_text('{"status": "fin')
    folder = RunFolder(run, said.append)
    assert (folder.summary, folder.status) == (None, None)
    assert [Path(text.partition(" ")[0]).name for text in said] == ["provenance.json", "summary.json"]


@pytest.mark.parametrize(
    ("text", "says"),
    [(None, "has no config.yaml"), ("a: [", "holds no settings"), ("7", "holds no settings"), ("{}", "prompt.reward")],
)
def test_settings_that_cannot_be_read_are_one_line(run, text, says):
    (run / "config.yaml").unlink() if text is None else (run / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=rf"^.*{says}.*: give the folder of one run[^\n]*$"):
        RunFolder(run).grading()


def test_a_folder_of_a_later_version_is_one_line(run, capsys):
    told = json.loads((run / "provenance.json").read_text())
    assert told["schema_version"] == files.VERSION
    (run / "provenance.json").write_text(json.dumps(told | {"schema_version": 99}))
    for name, *options in (("curves",), ("inspect",), ("inspect", "--regrade")):
        assert subcommand(name, run, *options) == 2
        said = capsys.readouterr().err
        assert said == f"rlreason: {run} is a run folder of version 99, and this program reads up to version 1" + (
            ": update rlreason\n"
        )


def test_reading_imports_neither_torch_nor_hydra(run):
    probe = (
        "import sys; from pathlib import Path; from rlreason.records.reader import RunFolder; "
        f"assert RunFolder(Path({str(run)!r})).metrics; assert not {{'torch', 'hydra', 'omegaconf'}} & {{*sys.modules}}"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, cwd=PACKAGE.parent)
    assert done.returncode == 0, done.stderr


def test_no_other_package_names_a_file_of_the_run_folder():
    """`runtime` lies below `records` and has the name of the log itself; Hydra has a `config.yaml` of its own.

    The sandbox has a copy of a program.
    """
    names = [name for name in files.CONTENTS if "." in name] + [files.SUMMARY, "hydra.yaml"]
    found = []
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text("utf-8"))
        for node in ast.walk(tree):
            text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
            if " " not in text and any(name in text for name in names):
                found.append(f"{path.relative_to(PACKAGE)}:{node.lineno} {text}")
    outside = [line for line in found if not line.startswith(("records/", "runtime/streams.py", "discovery/sandbox/"))]
    assert outside == []


def test_what_is_no_run_of_a_sweep_is_left_out_and_a_run_that_never_began_is_said(run, tmp_path, capsys):
    for name in ("run/broken_off_1", "sweep/broken_off_1", "sweep/a"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / files.CONFIG).write_text("algorithm: grpo\n")
    (tmp_path / "killed").mkdir()
    write_status(tmp_path / "killed", "running")
    assert [path.name for path in runs_in(tmp_path / "sweep")] == ["a"]
    for name in ("inspect", "curves"):
        assert subcommand(name, tmp_path / "killed") == 2
        assert "killed before it began" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"token_ids": [1.5]}, "token_ids"),
        ({"log_probs": [-0.5, -0.5]}, "log_probs"),
        ({"log_probs": []}, "log_probs"),
        ({"trainer_log_probs": 5}, "trainer_log_probs"),
        ({"trainer_log_probs": [-0.5, -0.5]}, "trainer_log_probs"),
        ({"prompt_reward": 5}, "prompt_reward"),
        ({"prompt_reward": {"reward": 1.0}}, "prompt_reward"),
        ({"entropy": "high"}, "entropy"),
        ({"trainer_log_probs": None, "prompt_reward": None, "entropy": None}, ""),
    ],
)
def test_a_field_that_cannot_be_learned_from_makes_a_row_unusable(run, change, says):
    file = RunFolder(run).rollouts()[0]
    row = json.loads(opened(file.path).read()) | change
    assert lacks(row, TO_LEARN) == (f"no usable '{says}'" if says else "")
    assert says or sample_of(row)


@pytest.mark.parametrize(
    ("file", "text", "words", "says"),
    [
        ("config.yaml", "prompt: {reward: r1_zero}\ngrading: 5\n", ["inspect"], "grading=5"),
        ("config.yaml", "prompt: {reward: r1_zero}\ngrading: {rel_tol: abc}\n", ["inspect"], "grading.rel_tol"),
    ],
)
def test_a_broken_document_is_one_line(run, file, text, words, says, capsys):
    (run / file).write_text(text)
    (run / "evals/step_00009.jsonl.gz").mkdir()
    assert subcommand(*words, run) == 2
    said = capsys.readouterr().err
    assert says in said
    assert len(said.splitlines()) == 1
