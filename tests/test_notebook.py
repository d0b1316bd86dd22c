"""docs/first_hour.ipynb: executed small, and what is committed of its whole execution is fit to be read."""

import os
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "docs/first_hour.ipynb"


def outputs_of(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
    return outputs


def test_the_notebook_is_committed_as_a_whole_execution_left_it():
    text = NOTEBOOK.read_text()
    assert len(text) < 300_000
    assert not re.search(r"/(tmp|root|home|work)/|\"execution\"|Traceback", text)
    notebook = nbformat.read(NOTEBOOK, 4)
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    assert outputs_of(notebook)
    assert "80/80" in text  # the demo at its own size


@pytest.mark.long
def test_the_notebook_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("RLREASON_FIRST_HOUR", "small")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]))
    notebook = nbformat.read(NOTEBOOK, 4)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    folders = {path.parent.name for path in (tmp_path / "first_hour").glob("*/summary.json")}
    assert folders == {"demo", "shows_work"} | {
        f"{name}_{seed}" for name in ("reinforce_with_baseline", "no_baseline") for seed in (0, 1)
    }
    assert not [output.text for output in outputs_of(notebook) if output.get("name") == "stderr"]
