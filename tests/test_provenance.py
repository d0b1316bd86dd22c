"""What a run says of its origin: commit and changes, libraries and machine, data, prompts and weights."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlreason import Run, evaluate, train
from rlreason.records.provenance import (
    Origin,
    code_differs,
    commit_of,
    differences,
    own_code,
    package_digest,
    part_line,
    provenance,
)
from rlreason.runtime.text import HIDDEN
from tests.some import some
from tests.starts import ROOT
from tests.test_api import TINY

JOB = tuple(word for word in TINY if not word.startswith(("n_steps", "rollout_batch", "group_size")))


def git(root: Path, *words: str) -> str:
    said = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=True)
    return said.stdout


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A checkout with one commit of two files."""
    root = tmp_path / "checkout"
    root.mkdir()
    (root / "a.py").write_text("".join(f"line_{n} = {n}\n" for n in range(20)))
    (root / "b é.txt").write_text("one\n")
    git(root, "init", "-q")
    git(root, "add", "-A")
    git(root, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "first")
    return root


def test_a_checkout_has_a_commit_and_says_whether_files_differ_from_it(checkout, tmp_path):
    commit = git(checkout, "rev-parse", "HEAD").strip()
    assert commit_of(checkout) == commit
    (checkout / "b é.txt").write_text("two\n")
    assert commit_of(checkout) == f"{commit}+changes"
    git(checkout, "checkout", "-q", ".")
    (checkout / "new.py").write_text("")
    assert commit_of(checkout) == f"{commit}+changes"
    (tmp_path / "empty").mkdir()
    assert commit_of(tmp_path / "empty") is None


def test_git_starts_no_program_that_a_repository_names(checkout, tmp_path):
    trap = tmp_path / "trap"
    trap.write_text(f"#!/bin/sh\ntouch '{tmp_path}/sprung'\n")
    trap.chmod(0o755)
    git(checkout, "config", "core.fsmonitor", str(trap))
    (checkout / "a.py").write_text("changed = 1\n")
    assert str(commit_of(checkout)).endswith("+changes")
    assert not (tmp_path / "sprung").exists()


def test_the_users_own_checkout_is_named_besides(checkout, tmp_path, monkeypatch):
    monkeypatch.chdir(checkout)
    assert own_code() == {"commit": commit_of(checkout)}
    (checkout / "a.py").write_text("own = 1\n")
    assert own_code() == {"commit": f"{git(checkout, 'rev-parse', 'HEAD').strip()}+changes"}
    assert own_code(root=checkout) is None  # which is this program's own
    monkeypatch.chdir(tmp_path)
    assert own_code() is None


def test_provenance_is_made_without_torch_and_names_neither_host_nor_other_variables(monkeypatch):
    program = (
        "import json, sys; from rlreason.records.provenance import Origin, provenance; "
        "print(json.dumps(provenance(Origin(['seed=1', 'logger.token=swordfish1'])))); "
        "assert not {'torch', 'hydra', 'transformers', 'numpy'} & {*sys.modules}"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "3", "PRIVATE": "my-own-business"}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    told = json.loads(done.stdout)
    assert told["command"] == f"python -m rlreason seed=1 'logger.token={HIDDEN}'"
    assert told["environment"]["OMP_NUM_THREADS"] == "3"
    assert {"torch", "numpy", "tokenizers", "safetensors", "transformers"} <= told["packages"].keys()
    assert told["hardware"]["processors"] >= told["cpu_count"] >= 1
    assert told["hardware"]["memory_gb"] > 0
    assert told["hardware"]["cpu"]
    assert told["code"] == package_digest()
    assert told["directory"] == str(Path.cwd())
    assert "my-own-business" not in done.stdout
    assert not {"host", "hostname", "user"} & (told.keys() | told["hardware"].keys())


def test_a_run_of_a_sweep_says_so(monkeypatch):
    assert "sweep" not in provenance(Origin())
    monkeypatch.setenv("RLREASON_JOB_OF_SWEEP", "grid")
    assert provenance(Origin())["sweep"] == "grid"


def test_another_commit_with_the_same_source_is_no_other_code():
    then = {"commit": "0" * 40, "code": "same", "rlreason": "1"}
    assert code_differs(then, then | {"commit": "1" * 40}) == ""
    said = code_differs(then, then | {"commit": "1" * 40, "code": "other"})
    assert said == "the code has changed: commit 0000000000 then, commit 1111111111 now"
    said = code_differs({"rlreason": "1", "code": "a"}, {"rlreason": "1", "code": "b"})
    assert said == "the code has changed: rlreason 1 (no git) (code a) then, rlreason 1 (no git) (code b) now"
    own = {"own_code": {"commit": "3" * 40}}
    assert "with own code 3333333333 now" in code_differs(then | {"own_code": {"commit": "2" * 40}}, then | own)


def test_a_part_that_was_killed_has_no_end():
    told = {"started": "T", "commit": None, "command": "python -m rlreason", "status": "running"}
    assert part_line(told) == "T, python -m rlreason: ended without a word (killed, or the machine went down)"
    assert "\n" not in part_line({})


def test_differences_are_found_in_groups_too():
    then = {"a": 1, "g": {"x": 1, "gone": 2}, "only then": 1}
    now = {"a": 2, "g": {"x": 1, "new": [3]}, "only now": 1}
    assert differences(then, now, ["a", "g", "only then", "only now"]) == [
        "a: 1 then, 2 now",
        "g.gone: 2 then, none now",
        "g.new: none then, [3] now",
    ]


def told_of(run: Run) -> dict:
    return json.loads((run.folder / "provenance.json").read_text())


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> Run:
    folder = tmp_path_factory.mktemp("measured") / "run"
    return evaluate(*JOB, f"hydra.run.dir={folder}", quiet=True)


FACTS = ("data", "prompts", "model", "tokenizer", "sampling", "eval_sampling", "engine", "seeds", "device")


def test_a_job_says_what_its_parts_are(measured):
    told = told_of(measured)
    assert {*FACTS} <= told.keys()
    assert told["eval_sampling"] == {
        "temperature": 1.0, "min_tokens": 4, "max_tokens": 8, "stop": ["</answer>"], "tags": [],
        "end_ids": told["sampling"]["end_ids"], "samples": 1,
    }  # fmt: skip
    assert told["model"]["start_weights"] == measured.summary["weights"]
    assert told["engine"] == {"name": "hf", "max_rows": 256}
    assert told["seeds"] == {"seed": 0, "model.seed": 0}
    assert told["device"]["threads"] >= 1


@pytest.mark.parametrize(
    ("word", "other"),
    some(
        [
            ("seed=5", {"seeds"}),
            ("model.seed=1", {"model", "seeds"}),
            ("prompt=r1_zero", {"prompts", "model", "tokenizer"}),
            ("sampling.temperature=0.5", {"sampling", "eval_sampling"}),
            ("data.n_validation=9", {"data"}),
            ("rollout.max_rows=2", {"engine"}),
        ]
    ),
)
def test_each_fact_follows_its_setting_alone(word, other, measured, tmp_path):
    told, before = told_of(evaluate(*JOB, word, f"hydra.run.dir={tmp_path / 'run'}", quiet=True)), told_of(measured)
    assert {name for name in FACTS if told[name] != before[name]} == other


def test_a_training_run_says_it_before_its_first_step(tmp_path, measured):
    run = train(*TINY, f"hydra.run.dir={tmp_path / 'run'}", quiet=True)
    told, before = told_of(run), told_of(measured)
    assert {*FACTS} <= told.keys()
    for name in ("model", "tokenizer", "prompts", "device", "engine"):
        assert told[name] == before[name], name  # the weights are those before training
