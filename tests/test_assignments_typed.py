"""Every command of docs/assignments.md as it is typed, made small, and the write-up that finds what it left."""

import json
import re
import shutil
from pathlib import Path

import pytest

from rlreason.report.assignment import course_of
from tests.starts import SMALL, Started, rlreason

PAGE = Path(__file__).parents[1] / "docs/assignments.md"
HEADINGS = {"cs336_2025": "2025", "cs336_2026": "2026", "pku_hw3": "PKU"}
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
    "cs336_2026_off_policy": ["n_steps=1", *FEW],
    "leaderboard": [*STEPS, "eval.sampling.max_tokens=8", "eval.sampling.min_tokens=1"],
}
TEMPLATE = (
    "A conversation between User and Assistant. The User asks a question, and the Assistant solves it. The Assistant "
    "first thinks about the reasoning process in the mind and then provides the User with the answer. The reasoning "
    "process is enclosed within <think> </think> and answer is enclosed within <answer> </answer> tags, respectively, "
    "i.e., <think> reasoning process here </think> <answer> answer here </answer>.\n"
    "User: {question}\nAssistant: <think>"
)


def lines(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A small model folder, MATH in the course's layout, sft.jsonl in the handout's format, and GSM8K."""
    folder = tmp_path_factory.mktemp("typed")
    done = rlreason(*SMALL, "save_model=true", "hydra.run.dir=start", cwd=folder)
    assert done.returncode == 0, done.stderr
    shutil.move(folder / "start/model", folder / "MODEL")
    config = json.loads((folder / "MODEL/config.json").read_text())
    (folder / "MODEL/config.json").write_text(json.dumps(config | {"max_position_embeddings": 2048}))
    (folder / "MATH").mkdir()
    (folder / "GSM8K").mkdir()
    for split, numbers in (("train", range(2048)), ("validation", range(5000, 5012))):
        asked = [(f"What is {k} + {k + 1}?", f"We add: {k} + {k + 1}.", str(2 * k + 1)) for k in numbers]
        math = [{"problem": q, "solution": f"{s} So \\boxed{{{a}}}.", "answer": a} for q, s, a in asked]
        lines(folder / f"MATH/{split}.jsonl", math)
        gsm8k = [{"question": q, "answer": f"{s}\n#### {a}"} for q, s, a in asked]
        lines(folder / f"GSM8K/{'test' if split == 'validation' else split}.jsonl", gsm8k)
        traces = [(TEMPLATE.format(question=q), s, a if k % 3 else 0) for k, (q, s, a) in enumerate(asked[:40])]
        if split == "train":
            rows = [{"prompt": q, "response": f" {s} </think> <answer> {a} </answer>"} for q, s, a in traces]
            lines(folder / "MATH/sft.jsonl", rows)
    return folder


def rows_of(course: str) -> list[str]:
    """The commands of a course on the page, and for PKU those of 2025 that it takes over."""
    parts = {part.splitlines()[0]: part for part in PAGE.read_text().split("\n## ")}
    (page,) = (part for title, part in parts.items() if HEADINGS[course] in title)
    found = [row for row in re.findall(r"`python -m rlreason (.*?)`", page) if "algorithm=discover" not in row]
    if course == "pku_hw3":
        taken = [question for question in course_of(course).questions if question.id.startswith("grpo")]
        found += [c.removeprefix("python -m rlreason ") for question in taken for c in question.commands()]
    return found


def small(row: str) -> list[str]:
    """The words of a command with what makes it small; of several seeds, the first."""
    words = [word.replace("MATH_DIR", "MATH") for word in row.split() if not word.startswith("seed=")]
    sweep = next((word.partition("=")[2] for word in words if word.startswith("sweep=")), "")
    learns = not {"algorithm=evaluate", "algorithm=best_of_n"} & set(words)
    sizes = OF_SWEEP.get(sweep, STEPS) if learns else []
    data = "MATH" if "experiment=cs336_2025" in words else "GSM8K"
    words += [] if any(word.startswith("data.path=") for word in words) else [f"data.path={data}"]
    return [*words, "model.path=MODEL", "sampling.max_tokens=4", "sampling.min_tokens=1", *sizes]


@pytest.mark.long
@pytest.mark.parametrize("course", list(HEADINGS))
def test_every_row_of_the_page_is_found_by_the_write_up(course, place):
    """What is typed as the page says stood in folders that the write-up did not look into."""
    cwd = place / course
    cwd.mkdir()
    for name in ("MODEL", "MATH", "GSM8K"):
        (cwd / name).symlink_to(place / name)
    # a rehearsal on the built-in task, under the name that the real sweep would have had
    if course == "cs336_2025":
        done = rlreason("-m", "sweep=grpo_baselines", *SMALL, cwd=cwd)
        assert done.returncode == 0, done.stderr
    for row in rows_of(course):
        done = Started(*small(row), cwd=cwd).finished(1800)
        assert done.returncode == 0, (row, done.stdout[-3000:], done.stderr[-3000:])
    assert rlreason("report", "--assignment", course, "--json", "told.json", cwd=cwd).returncode == 0
    told = json.loads((cwd / "told.json").read_text())
    assert told["problems"] == []
    states = {one["question"]: one["state"] for one in told["questions"]}
    assert {question for question, state in states.items() if state not in ("done", "in words")} == set()
    text = (cwd / "runs/writeup.md").read_text()
    assert "tiny" not in text
