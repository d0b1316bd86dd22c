"""Every command of a course in docs/assignments.md as it is typed, made small; the write-up finds what they left."""

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.starts import ROOT, SMALL, Started, rlreason

COURSE = "cs336_2025"
FEW = ["rollout_batch_size=16", "group_size=4"]
STEPS = [*FEW, "train_batch_size=16", "n_steps=1"]
#: What makes a sweep small: its own axes and cells stay as they are.
OF_SWEEP = {
    "sft_dataset_size": ["data.limit=16,null", "train_batch_size=8"],
    "sft_tuning": ["train_batch_size=8,16", "epochs=1"],
    "sft_filtered": ["train_batch_size=8", "epochs=1"],
    "expert_iteration": ["train_batch_size=64", "n_steps=1"],
    "grpo_off_policy_broad": ["n_steps=1", "group_size=4"],
    "grpo_off_policy_focused": ["n_steps=1", *FEW],
    "grpo_off_policy_clip_ablation": ["n_steps=1", *FEW],
    "leaderboard": [*STEPS, "eval.sampling.max_tokens=8", "eval.sampling.min_tokens=1"],
}


def lines(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def place(tmp_path) -> Path:
    """A small model folder, MATH in the course's layout, and sft.jsonl in the handout's format."""
    done = rlreason(*SMALL, "save_model=true", "hydra.run.dir=start", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    shutil.move(tmp_path / "start/model", tmp_path / "MODEL")
    config = json.loads((tmp_path / "MODEL/config.json").read_text())
    (tmp_path / "MODEL/config.json").write_text(json.dumps(config | {"max_position_embeddings": 2048}))
    (tmp_path / "MATH").mkdir()
    for split, numbers in (("train", range(2048)), ("validation", range(5000, 5012))):
        asked = [(f"What is {k} + {k + 1}?", f"We add: {k} + {k + 1}.", str(2 * k + 1)) for k in numbers]
        math = [{"problem": q, "solution": f"{s} So \\boxed{{{a}}}.", "answer": a} for q, s, a in asked]
        lines(tmp_path / f"MATH/{split}.jsonl", math)
        if split == "train":  # a third of the traces is wrong
            traces = [(q, f" {s} </think> <answer> {a if n % 3 else 0} </answer>") for n, (q, s, a) in enumerate(asked)]
            template = (ROOT / "prompts/r1_zero.prompt").read_text()
            rows = [{"prompt": template.replace("{question}", q), "response": text} for q, text in traces[:40]]
            lines(tmp_path / "MATH/sft.jsonl", rows)
    return tmp_path


def small(row: str) -> list[str]:
    """The words of a command with what makes it small; of several seeds, the first."""
    words = [word.replace("MATH_DIR", "MATH") for word in row.split() if not word.startswith("seed=")]
    sweep = next((word.partition("=")[2] for word in words if word.startswith("sweep=")), "")
    learns = not {"algorithm=evaluate", "algorithm=best_of_n"} & set(words)
    words += [] if any(word.startswith("data.path=") for word in words) else ["data.path=MATH"]
    sizes = OF_SWEEP.get(sweep, STEPS) if learns else []
    return [*words, "model.path=MODEL", "sampling.max_tokens=4", "sampling.min_tokens=1", *sizes]


@pytest.mark.long
def test_every_row_of_the_page_is_found_by_the_write_up(place):
    """What is typed as the page says stood in folders that the write-up did not look into."""
    # a rehearsal on the built-in task, under the name that the real sweep would have had
    done = rlreason("-m", "sweep=grpo_baselines", *SMALL, cwd=place)
    assert done.returncode == 0, done.stderr
    (page,) = (part for part in (ROOT / "docs/assignments.md").read_text().split("\n## ") if "2025" in part[:60])
    for row in re.findall(r"`python -m rlreason (.*?)`", page):
        done = Started(*small(row), cwd=place).finished(1800)
        assert done.returncode == 0, (row, done.stdout[-3000:], done.stderr[-3000:])
    assert rlreason("report", "--assignment", COURSE, "--json", "told.json", cwd=place).returncode == 0
    told = json.loads((place / "told.json").read_text())
    assert told["problems"] == []
    assert {one["question"] for one in told["questions"] if one["state"] not in ("done", "in words")} == set()
    assert "tiny" not in (place / "runs/writeup.md").read_text()
