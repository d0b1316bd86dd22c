"""`rollout=auto`, the default: what it stands for, and that a run, its records and its resumption see that engine."""

import json
import shutil

import pytest
import yaml

from rlreason import compose as train_config
from rlreason.config.groups import engine_here
from rlreason.config.rules import complaints
from rlreason.config.store import typed
from rlreason.errors import ConfigError
from rlreason.sweeps.state import RunState, refuse_changed

OTHER = {"hf": "vllm", "vllm": "hf"}
PRETRAINED = ("model=qwen3_0_6b", "data.path=a/b")


@pytest.mark.parametrize("missing", ["", "files", "gpu", "vllm"])
def test_vllm_takes_a_model_in_files_a_gpu_and_vllm(missing, monkeypatch):
    monkeypatch.setattr("rlreason.config.groups.finds_gpus", lambda: missing != "gpu")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if missing != "vllm" else None)
    assert engine_here(None if missing == "files" else "a/b") == ("hf" if missing else "vllm")


def test_the_settings_of_a_run_hold_the_engine_that_was_chosen(composed):
    for words, path in (((), None), (PRETRAINED, "Qwen/Qwen3-0.6B")):
        run = typed(composed(*words))
        assert run.rollout.engine == engine_here(path)
        named = typed(composed(*words, f"rollout={run.rollout.engine}"))
        assert named == run
        assert complaints(run) == {}
    assert typed(composed()).rollout.engine == "hf"  # the built-in model, whatever there is
    assert typed(composed(*PRETRAINED, "rollout=vllm")).rollout.engine == "vllm"


def test_a_run_records_its_engine_and_goes_on_with_it(finished_run, tmp_path, monkeypatch):
    """Also on a machine that has, or lacks, a GPU."""
    assert "rollout=auto" not in finished_run.printed  # the usual engine is worth no word
    finished = shutil.copytree(finished_run.folder, tmp_path / "run")
    settings = yaml.safe_load((finished / "config.yaml").read_text())
    assert settings["rollout"]["engine"] == "hf"
    assert " rollout=" not in json.loads((finished / "provenance.json").read_text())["command"]
    monkeypatch.chdir(finished.parent)
    settings["rollout"]["engine"] = OTHER[engine_here(None)]
    (finished / "config.yaml").write_text(yaml.safe_dump(settings))
    assert train_config(f"resume={finished}").rollout.engine == OTHER[engine_here(None)]
    assert train_config(f"resume={finished}", "rollout=hf").rollout.engine == "hf"


def test_a_sweep_whose_nodes_chose_another_engine_goes_on_where_it_was_started(tmp_path):
    """As behind a login node without a GPU; an engine that the words name is a setting like any other."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a/config.yaml").write_text("rollout: {engine: vllm}\nn_steps: 3\n")
    (tmp_path / "a/summary.json").write_text("{}")

    def refused(word: str, config: str) -> str:
        run = RunState("a", [word], {}, 0)
        try:
            refuse_changed(tmp_path, [run], lambda run: config)
        except ConfigError as error:
            return str(error)
        return ""

    assert refused("seed=0", "rollout: {engine: hf}\nn_steps: 3\n") == ""
    assert "rollout.engine" in refused("rollout=hf", "rollout: {engine: hf}\nn_steps: 3\n")
    assert "n_steps" in refused("seed=0", "rollout: {engine: hf}\nn_steps: 4\n")
