"""What a run says of its origin: commit and changes, libraries and machine, data, prompts and weights."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlreason import Run, evaluate, train
from rlreason.records import code_state
from rlreason.records.code_state import changes_of, commit_of, keep_changes, own_code, package_digest
from rlreason.records.provenance import code_differs, differences, part_line, provenance
from rlreason.runtime.secrets import HIDDEN
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


def test_a_clean_checkout_has_a_commit_and_no_changes(checkout, tmp_path):
    assert commit_of(checkout) == git(checkout, "rev-parse", "HEAD").strip()
    assert changes_of(checkout) is None
    assert keep_changes(tmp_path, checkout) == {}
    assert not (tmp_path / "changes.patch").exists()
    (tmp_path / "empty").mkdir()
    assert commit_of(tmp_path / "empty") is None
    assert changes_of(tmp_path / "empty") is None


def test_the_difference_is_kept_so_that_it_can_be_applied(checkout, tmp_path):
    (checkout / "a.py").write_text((checkout / "a.py").read_text().replace("line_3 = 3", "line_3 = 4"))
    (checkout / "b é.txt").write_text("one\ntwo\n")
    (checkout / "new.py").write_text("password = 'swordfish'\n")
    told = keep_changes(tmp_path, checkout)["changes"]
    assert told["files"] == ["a.py", "b é.txt"]
    assert told["untracked"] == ["new.py"]
    patch = (tmp_path / "changes.patch").read_text()
    assert patch.startswith(f"# changes {told['digest']} to commit {git(checkout, 'rev-parse', 'HEAD').strip()}\n")
    assert "swordfish" not in patch
    changed = (checkout / "a.py").read_text()
    git(checkout, "checkout", "-q", ".")
    git(checkout, "apply", str(tmp_path / "changes.patch"))
    assert (checkout / "a.py").read_text() == changed
    assert keep_changes(tmp_path, checkout)["changes"]["digest"] == told["digest"]
    assert (tmp_path / "changes.patch").read_text() == patch  # a second part of the run with the same changes adds none


def test_the_second_part_of_a_run_adds_its_own_changes(checkout, tmp_path):
    for text in ("line = 1\n", "line = 2\n"):
        (checkout / "a.py").write_text(text)
        digest = keep_changes(tmp_path, checkout)["changes"]["digest"]
        assert f"# changes {digest} to commit " in (tmp_path / "changes.patch").read_text()
    assert "+line = 1\n" in (tmp_path / "changes.patch").read_text()
    assert "+line = 2\n" in (tmp_path / "changes.patch").read_text()


def test_secrets_are_hidden_and_still_make_a_difference(checkout, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "environment-fish")
    digests = set()
    for secret in ("swordfish-1", "swordfish-2"):
        (checkout / "a.py").write_text(f"api_key = '{secret}'\nname = 'environment-fish'\n")
        changes = changes_of(checkout)
        assert changes is not None
        assert "swordfish" not in changes.patch
        assert "environment-fish" not in changes.patch
        assert changes.patch.count(HIDDEN) == changes.facts()["secrets_hidden"] == 2
        digests.add(changes.digest)
    assert len(digests) == 2


def test_a_long_difference_is_cut_and_says_so(checkout):
    texts = [f"{kind}{'x' * 60}\n" * 40_000 for kind in "ab"]
    patches, digests = [], []
    for text in texts:
        (checkout / "b é.txt").write_text("y" * 70 + "\n" + "same\n" * 300_000 + text)
        changes = changes_of(checkout)
        assert changes is not None
        patches.append(changes.patch)
        digests.append(changes.digest)
    assert all(len(patch.encode()) < code_state.MOST_BYTES + 100 for patch in patches)
    assert all(patch.splitlines()[-1].startswith("# cut here: ") for patch in patches)
    assert digests[0] != digests[1]  # the digest is of all of it


def test_git_starts_no_program_that_a_repository_names(checkout, tmp_path):
    trap = tmp_path / "trap"
    trap.write_text(f"#!/bin/sh\ntouch '{tmp_path}/sprung'\n")
    trap.chmod(0o755)
    for key in ("diff.external", "core.fsmonitor", "diff.own.textconv"):
        git(checkout, "config", key, str(trap))
    (checkout / ".git/info/attributes").write_text("*.py diff=own\n")
    (checkout / "a.py").write_text("changed = 1\n")
    changes = changes_of(checkout)
    assert changes is not None
    assert "+changed = 1" in changes.patch
    assert not (tmp_path / "sprung").exists()


def test_the_users_own_checkout_is_named_besides(checkout, tmp_path, monkeypatch):
    monkeypatch.chdir(checkout)
    assert own_code() == {"commit": commit_of(checkout)}
    (checkout / "a.py").write_text("own = 1\n")
    found = own_code()
    assert found is not None
    assert found["commit"].endswith("+changes")
    assert len(found["digest"]) == code_state.DIGITS
    assert own_code(root=checkout) is None  # which is this program's own
    monkeypatch.chdir(tmp_path)
    assert own_code() is None


def test_provenance_is_made_without_torch_and_names_neither_host_nor_other_variables(monkeypatch):
    program = (
        "import json, sys; from rlreason.records.provenance import provenance; "
        "print(json.dumps(provenance({'a': 'B'}, ['seed=1', 'logger.token=swordfish1']))); "
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
    assert told["schemas"] == {"a": "B"}
    assert told["directory"] == str(Path.cwd())
    assert "my-own-business" not in done.stdout
    assert not {"host", "hostname", "user"} & (told.keys() | told["hardware"].keys())


def test_a_run_of_a_sweep_says_so(monkeypatch):
    assert "sweep" not in provenance({})
    monkeypatch.setenv("RLREASON_JOB_OF_SWEEP", "grid")
    assert provenance({})["sweep"] == "grid"


def test_another_commit_with_the_same_source_is_no_other_code():
    then = {"commit": "0" * 40, "code": "same", "rlreason": "1"}
    assert code_differs(then, then | {"commit": "1" * 40, "changes": {"digest": "x"}}) == ""
    said = code_differs(then, then | {"commit": "1" * 40, "code": "other"})
    assert said == "the code has changed: commit 0000000000 then, commit 1111111111 now"
    said = code_differs(then, then | {"code": "other", "commit": f"{'0' * 40}+changes", "changes": {"digest": "d1"}})
    assert said == "the code has changed: commit 0000000000 then, commit 0000000000+changes (d1) now"
    said = code_differs({"rlreason": "1", "code": "a"}, {"rlreason": "1", "code": "b"})
    assert said == "the code has changed: rlreason 1 (no git) (code a) then, rlreason 1 (no git) (code b) now"
    own = {"own_code": {"commit": "2" * 40, "digest": "dd"}}
    assert "with own code 2222222222 dd now" in code_differs(then | {"own_code": {"commit": "2" * 40}}, then | own)
    assert code_differs({"commit": "0" * 40}, {"commit": "0" * 40, "code": "x"}) == ""  # of a version before


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
