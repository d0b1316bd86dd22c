"""`rlreason SUBCOMMAND ...`: every subcommand on a run's folder, its figures as JSON, and its mistakes."""

import json
from pathlib import Path

import pytest

from rlreason.cli import subcommands as s
from rlreason.cli.flags import composing, config_of, keys_below, options_by_group, read
from rlreason.errors import ConfigError
from rlreason.records.writer import RunWriter
from rlreason.types import Grade, Problem, Response, Sample
from tests.starts import UNUSED, loaded, subcommand
from tests.test_output import left_after

CONFIG = "algorithm: grpo\nmodel: {name: tiny}\nprompt: {reward: r1_zero}\nloss: {loss_type: gspo}\nseed: 3\n"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A training run as it is while it goes on: two steps of rollouts, one evaluation, no summary."""
    folder = tmp_path_factory.mktemp("runs") / "one"
    records = RunWriter(folder, CONFIG)
    problems = [Problem("p0", "How many?", "7"), Problem("p1", "How many more?", "8")]
    right = Response("p0", [5], [1, 2], [-0.5, -1.0], "so </think> <answer>7</answer>", "stop")
    wrong = Response("p1", [5], [1, 2], [-0.5, -1.0], "so </think> <answer>9</answer>", "length")
    samples = [Sample(right, Grade(1.0, 1.0, 1.0, "correct")), Sample(wrong, Grade(1.0, 0.0, 0.0, "wrong"))]
    for kind, step in (("rollouts", 1), ("rollouts", 2), ("evals", 0)):
        records.responses(kind, step, samples, problems)
    (folder / "metrics.jsonl").write_text('{"train_step": 1, "reward/mean": 0.5, "train/loss": NaN}\n')
    curves = {"n_list": [1, 4], "best_of_n": {"pass@N": [[0.2, 0.1, 0.3], [0.5, 0.4, 0.6]]}}
    protocol = {"problems": 2, "samples per problem": 4, "hash": "3f2a91c0"}
    (folder / "summary.json").write_text(json.dumps(curves | {"protocol": protocol}))
    return folder


def test_the_json_of_a_subcommand_holds_what_it_prints_or_is_not_written(run, tmp_path, capsys, monkeypatch):
    """Bug: figures of a file and of standard output differ, a text stands among them, or a mistake empties the file."""
    monkeypatch.setattr("rlreason.cli.inspect.opinions", lambda rows, *_: [None] * len(rows))  # of a second grader
    target = tmp_path / "seed=0/figures.json"
    target.parent.mkdir()
    assert subcommand("inspect", run, "--json", target) == 0
    said, before = capsys.readouterr().out, target.read_text()
    assert "2 responses: 1 correct, 1 format1_wrong" in said
    assert subcommand("inspect", run, "--json") == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures == json.loads(before)
    counts = {"correct": 1, "format1_wrong": 1, "format0": 0, "truncated": 1}
    assert (figures["verb"], figures["counts"]) == ("inspect", counts)
    assert subcommand("inspect", run, "--step", "9", "--json", target) == 2
    assert "the steps 0, 1, 2" in capsys.readouterr().err
    assert target.read_text() == before
    assert subcommand("curves", run, "--json", "-") == 0
    assert json.loads(capsys.readouterr().out)["last"]["train/loss"] is None  # JSON has no word for NaN


def test_a_mistake_in_the_words_is_one_line_before_any_work(run, tmp_path, monkeypatch, capfd):
    """Bug: a wrong word or folder is answered by a traceback, or by minutes of work whose result has no place to go."""
    monkeypatch.chdir(tmp_path)
    for words, says in (
        (["inspect", run, "--json", tmp_path], f"--json '{tmp_path}'"), (["inspect", run.parent], str(run.parent)),
        (["inspect", run, "--markdown", "/nonexist/a.md"], "--markdown '/nonexist/a.md'"),
        (["inspect", tmp_path / "nowhere", "--gradients"], str(tmp_path / "nowhere")),
        (["inspect", run / "metrics.jsonl", "--regrade"], "metrics.jsonl"),
        (["doctor", "lr=3"], "did you mean learning_rate?"), (["doctor", "algorithm=discover"], "algorithm=discover"),
        (["score", "nowhere.py"], "PROGRAM=nowhere.py"), (["score", __file__, "--memory", "2X"], "--memory 2X"),
        (["plan", "--seeds", "none"], "--seeds: none must be"), (["plan", "--minutes", "3"], "add --seeds 4"),
        (["plan", "--json", "experiment=pku_hw3"], "--json experiment=pku_hw3"),
    ):  # fmt: skip
        assert subcommand(*words) == 2
        said = capfd.readouterr()
        assert says in said.err
        assert (said.out, len(said.err.splitlines())) == ("", 1)


def test_the_table_stands_behind_help_and_what_is_said_of_a_wrong_or_lonely_subcommand(capsys):
    """Bug: a subcommand without its help or its --json, or a setting's name that is taken for a misspelt one."""
    for name, (_, takes, purpose) in s.SUBCOMMANDS.items():
        assert any(f"rlreason {name} {takes}" in line and purpose in line for line in s.subcommands_help().splitlines())
        if not takes.startswith("["):  # whose words may be left out
            assert subcommand(name) == 2
            assert f"{takes.split()[0]}: write rlreason {name} " in capsys.readouterr().err
        with pytest.raises(SystemExit):
            subcommand(name, "--help")
        assert "--json" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"^inspct is no subcommand: .*mean rlreason inspect\?"):
        s.refuse_wrong_subcommand(["inspct", "runs/x"])
    with composing(read([])):
        groups, settings = options_by_group(), keys_below(config_of([], "config"))
    for word in {"-m", "~std_norm", *groups, *settings, *(name for names in groups.values() for name in names)}:
        s.refuse_wrong_subcommand([word])  # which the settings' own messages are for


def test_a_reader_who_leaves_has_an_exit_code_and_loses_no_figures(run, tmp_path):
    """Bug: a broken pipe is a traceback, or loses the figures that were to be written."""
    assert left_after(0, "-m", "rlreason", "inspect", str(run), "--json", str(tmp_path / "figures.json")) == (141, "")
    assert (tmp_path / "figures.json").exists(), "what was to be written was lost with the reader"


#: What only a run has a use for, and no question about settings, check of a sweep or sweep itself.
OF_RUNS = {"accelerate", "matplotlib", "safetensors", "scipy", "sympy", "torch", "transformers"}


def test_a_question_or_mistake_loads_no_library_of_runs(run, tmp_path):
    """Bug: an import at the top of a module makes every `--help` and every subcommand wait for torch."""
    questions = loaded(tmp_path, ["inspect", str(run)], ["inspct"], ["--help"], ["--cfg", "job"])
    assert not questions[0][1] & {*OF_RUNS, *UNUSED, "hydra"}
    assert [(code, modules & (OF_RUNS | UNUSED)) for code, modules in questions] == [(c, set()) for c in (0, 2, 0, 0)]
