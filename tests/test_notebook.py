"""docs/first_hour.ipynb, executed small."""

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]


@pytest.mark.long
def test_the_notebook_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("RLREASON_FIRST_HOUR", "small")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]))
    notebook = nbformat.read(ROOT / "docs/first_hour.ipynb", 4)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    folders = {path.parent.name for path in (tmp_path / "first_hour").glob("*/summary.json")}
    assert folders == {"demo", "shows_work"} | {
        f"{name}_{seed}" for name in ("reinforce_with_baseline", "no_baseline") for seed in (0, 1)
    }
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
    assert not [output.text for output in outputs if output.get("name") == "stderr"]
