"""The documents: commands of the README and the notebook run, pages are what the code says, every link leads on."""

import json
import os
import re
import shlex
import shutil
import tomllib
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from examples.scripted_server import serving
from rlreason.cli.compose import composed_alike, composed_run
from rlreason.cli.flags import composing, read
from rlreason.cli.mistakes import refuse_wrong_words
from rlreason.cli.names import sweep_options_spelt, translated
from rlreason.cli.subcommands import named_subcommand, parser_of
from rlreason.data.tasks import make_stories
from rlreason.discovery.score import problem_named
from rlreason.runtime.plugins import GROUPS
from rlreason.sweeps.design import fixed, named_sweep, parsed
from tests.starts import ROOT, Started
from tools.settings_page import page

README = (ROOT / "README.md").read_text("utf-8")
PAGES = {path.name: path.read_text("utf-8") for path in sorted((ROOT / "docs").glob("*.md"))}
NONE_WHOLE = ("architecture.md", "completion.md")  # one names a subcommand, one shows what Tab completes
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)


def blocks(text: str, *languages: str) -> list[str]:
    return [block for language, block in FENCED.findall(text) if language in languages]


def calls(text: str) -> list[list[str]]:
    """Return the words of every plain call of rlreason in the shell blocks of a page, then in its sentences."""
    lines = [line for block in blocks(text, "bash") for line in block.splitlines()]
    lines += re.findall(r"`((?:python -m )?rlreason [^`\n]+)`", FENCED.sub("", text))
    plain = [re.fullmatch(r"(?:python -m )?rlreason ([^|&;<>$]+)", line) for line in lines]
    return [shlex.split(match[1], comments=True) for match in plain if match]


#: Every sweep, with every experiment: tests/test_sweep_files.py composes each cell.
SWEEPS = {f"sweep={path.stem}" for path in (ROOT / "multirun_sweeps").glob("*.yaml")}


def check(words: list[str], composed_before: set[str]) -> None:
    """Read the words of a subcommand, or compose the first run of a command line, if a word of it is new."""
    if subcommand := named_subcommand(words):
        parser_of(subcommand).parse_args(words[1:])
        return
    if composed_before.issuperset(words):
        return
    composed_before.update(words)
    own = [re.sub(r"\bmy_losses\b", "examples.own_loss", word) for word in words if not word.startswith("resume=")]
    asked = read(own)
    with composing(asked):
        ours = translated(sweep_options_spelt(asked.overrides, asked.multirun), note=str)
        refuse_wrong_words(ours)
        if named_sweep(ours):
            composed_alike(fixed(ours), asked.config_name)
            return
        swept = [(str(one.input_line), one if one.is_sweep_override() else None) for one in parsed(ours)]
        first = [f"{one.key_or_group}={next(one.sweep_string_iterator())}" if one else word for word, one in swept]
        composed_run(first, asked.config_name, of_sweep=True, absent=[])


PAGES_RUN = (README, PAGES["models.md"], PAGES["evaluate.md"], PAGES["resume.md"])
COMMANDS = [words for page in PAGES_RUN for words in calls(page) if not any(word.startswith("gpus=") for word in words)]


COURSE = [words for words in calls(PAGES["assignments.md"]) if len(words) > 1]  # else it is a name
OF_PAGES = [calls(PAGES[name]) for name in PAGES if name not in NONE_WHOLE]


@pytest.mark.parametrize(
    "commands",
    [
        [*COMMANDS, *(max(found[::-1], key=len) for found in OF_PAGES if found)],
        pytest.param(COURSE, marks=pytest.mark.long),
    ],
    ids=["of the README and one of each page", "of the assignments"],
)
def test_the_commands_of_the_documents_compose(commands, tmp_path, monkeypatch):
    """Bug: a command on a page is refused: by a word, or by a rule between settings."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT))
    for name in ("RUN", "SWEEP"):
        (tmp_path / name).mkdir()
    assert len(COMMANDS) > 30
    before = {"-m", *SWEEPS}
    for words in commands:
        check(words, before)


def answers(words: list[str]) -> bool:
    """Whether a command reads or resumes what there is, or asks a question; what starts other runs is only composed."""
    of_there = any(word in ("resume=RUN", "algorithm=discover") for word in words)
    return bool(named_subcommand(words)) or of_there or not read(words).starts


@pytest.fixture
def real(finished_run, finished_sweep, tmp_path) -> dict[str, str]:
    """What the placeholders of the README stand for."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    rows = [{"question": p.question, "answer": f"{p.solution}\n#### {p.answer}"} for p in make_stories(32, seed=0)]
    for name, half in (("train", rows[:16]), ("test", rows[16:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in half))
    sweep = str(shutil.copytree(finished_sweep.folder, tmp_path / "sweep"))
    run = str(shutil.copytree(finished_run.folder, tmp_path / "run"))
    program = str(problem_named("kissing_11").folder / "examples/roots_220.py")
    things = {"RUN": run, "DIR": f"{run}/model", "GSM8K_DIR": str(tmp_path), "PROGRAM": program}
    return things | {"runs/sweeps/grpo_learning_rate": sweep, "SWEEP": sweep}


@pytest.mark.long
@pytest.mark.parametrize("words", filter(answers, COMMANDS), ids=lambda words: " ".join(words)[:90])
def test_a_command_of_the_readme_does_what_it_says(words, real, tmp_path):
    """Bug: a command that reads runs, resumes one or asks a question fails as it stands on the page."""
    names = re.compile(rf"\b({'|'.join(sorted(real, key=len, reverse=True))})\b")
    typed = [names.sub(lambda match: real[match[1]], word) for word in words]
    if words == ["resume=RUN"]:  # as if it had been killed at its very end
        (tmp_path / "run/summary.json").unlink()
        (tmp_path / "run/status.json").write_text('{"status": "running", "reason": "", "time": ""}\n')
    elif words[:1] == ["compare"]:
        typed[-1] = str(shutil.copytree(tmp_path / "run", tmp_path / "other"))
    elif "resume=RUN" in words:
        typed = [typed[0], "n_steps=3"]
    elif "algorithm=discover" in words:
        typed.append("budget.calls=12")
    (tmp_path / "runs").mkdir()
    with serving() as server:
        offline = {"HF_HUB_OFFLINE": "1", "OPENAI_BASE_URL": server.base_url}
        done = Started(*typed, cwd=tmp_path, **offline).finished()
    found = [0, 1] if words[:1] == ["health"] else [0]  # a run of two steps may have problems
    assert done.returncode in found, f"{typed}\n{done.stdout}\n{done.stderr}"
    assert done.stdout


@pytest.mark.long
def test_the_python_of_the_readme_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (block,) = blocks(README, "python")
    exec(compile(block, "README.md", "exec"), {"__name__": "readme"})
    assert len(list(tmp_path.glob("runs/*/*/summary.json"))) == 2  # a run, and its evaluation


@pytest.mark.long
def test_the_notebook_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("RLREASON_FIRST_HOUR", "small")
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    notebook = nbformat.read(ROOT / "docs/first_hour.ipynb", 4)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    folders = {path.parent.name for path in (tmp_path / "first_hour").glob("*/summary.json")}
    arms = {f"{name}_{seed}" for name in ("reinforce_with_baseline", "no_baseline") for seed in (0, 1)}
    assert folders == {"demo", "shows_work"} | arms
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
    assert not [output.text for output in outputs if output.get("name") == "stderr"]


def test_every_link_leads_on_the_index_names_every_page_and_settings_and_entry_points_are_those_of_the_code():
    """Bug: a link of a page is dead, a page is found by nobody, or says what the code said once."""
    found = dict[Path, set[str]]()
    for source in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        text = re.sub(r"```.*?```|`[^`\n]*`", "", source.read_text("utf-8"), flags=re.DOTALL)
        found[source] = {link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not re.match(r"\w+:", link)}
        for link in found[source]:
            name, _, heading = link.partition("#")
            target = (source.parent / name).resolve() if name else source
            assert target.exists(), f"{source.name} links to {link}, which is not there"
            if heading:  # as GitHub calls it: `#what-a-run-leaves`
                titles = re.findall(r"^#+ (.*)$", FENCED.sub("", target.read_text("utf-8")), re.MULTILINE)
                anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
                assert heading in anchors, f"{source.name}: {link} has no such heading"
    pages = {path.name for path in (ROOT / "docs").iterdir() if path.suffix in (".md", ".ipynb")} - {"README.md"}
    assert pages <= found[ROOT / "docs/README.md"]
    assert page() == PAGES["settings.md"], "docs/settings.md is not what the code says now: type `make docs`"
    (text,) = [block for text in PAGES.values() for block in blocks(text, "toml")]
    assert set(tomllib.loads(text)["project"]["entry-points"]) == set(GROUPS.values())
