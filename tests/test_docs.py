"""Every command and block of the documents is executed: small, with real things where RUN, DIR, FILE stand.

The documents are README.md, CONTRIBUTING.md, the pages and the notebook of docs/, and the docstrings of examples/.
A new command is tested without a change here. A block that no rule covers fails, and what cannot be executed stands
in `NOT_EXECUTED` with the reason.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest
import starts
import yaml
from doc_blocks import (
    ROOT,
    SHELLS,
    Block,
    Command,
    blocks,
    commands,
    documents,
    is_verb,
    keep_the_rules,
    resumed,
    runs,
    small,
    small_python,
    typed_before_tab,
    with_real_things,
    words_of,
)
from hydra import compose
from killed import AT
from run_records import differences
from sweep_folders import answers as right_answers
from sweep_folders import sweep

from examples.scripted_server import serving
from rlreason import train
from rlreason.cli.aliases import translated
from rlreason.cli.check import check_words
from rlreason.cli.choices import refuse_wrong_choices
from rlreason.cli.completion import answers
from rlreason.cli.flags import composing, read
from rlreason.cli.multirun import composed, fixed
from rlreason.cli.sweep_words import without_sweep_words
from rlreason.data.stories import make_stories
from rlreason.discovery.problem import problem_named
from rlreason.errors import ConfigError
from rlreason.plugins.announced import GROUPS
from rlreason.types import Problem

NOT_EXECUTED = {
    r"git clone": "is how one comes by this repository",
    r"make ": "installs and runs everything: CI's first steps",
    r"(uv )?pip (un)?install": "changes the environment that the tests run in: CI installs by pip",
    r"uv run": "needs uv, and starts what `python -m rlreason` starts",
    r"python benchmarks/(gpu_check|gpu_training)\.py": "is to be run on a GPU",
    r"python -m rlreason .*(second_gpu|gpus=)": "is for several GPUs",
    r"torchrun ": "starts ranks on GPUs, or on several machines: the tests of ranks start it on a processor",
    r"python -m rlreason -m sweep=(expert_iteration|sft_dataset_size)": "its cells are as large as they are: "
    "tests/test_assignments_typed.py runs them",
    r"python -m rlreason .*launcher=(submitit_slurm|ray)": "needs a cluster: tests/test_sweeps_slurm.py has its own",
    r"python benchmarks/(grpo|sft)_vs_trl\.py": "installs TRL; tests/test_benchmarks.py runs the other side",
    r"python benchmarks/(growth|rollout|task_effects)\.py": "measures for minutes or hours",
    r"(tensorboard|trackio|wandb) ": "needs a browser or an account; tests/test_loggers.py reads what was logged",
    r"python examples/scripted_server\.py": "serves until it is stopped: tests ask one of their own",
    r"export OPENAI_BASE_URL": "names that server, whose port is another one in a test",
    r"source \.venv/bin/activate": "changes the shell that it is typed into: the tests run in that environment",
    r'eval "\$\(~': "names an environment of the reader's own",
    r"rlreason inspect$": "names a verb, and no run",
    r"cd examples": "is where the commands after it are executed: in a copy of that folder",
    r"python -m rlreason report --assignment": "reads whatever lies below runs/: tests/test_report_assignment.py",
    r"python -m rlreason\.setup\.ship": "writes into the repository: a long test makes and compares the same",
    r"python tests/verdicts\.py": "writes into the repository: tests/test_grading.py compares with that",
    r"python tests/mutate_objectives\.py": "runs the tests of the formulas a hundred times",
}
#: Documents whose blocks other than commands are executed by another test.
ELSEWHERE = {"CONTRIBUTING.md": "tests/test_add_a_loss.py performs them, word for word"}
#: The files of a reader's own that commands name, as copies of these examples.
OWN = {"own_loss": "my_losses", "own_reward": "my_rewards", "own_task": "my_tasks"}
#: Blocks without a language: what is shown, by their first line.
SHOWN = {
    "The same question, before and after": "what the demo prints: tests/test_end_to_end.py has its words",
    "runs/grpo/": "a run's folder: its files are looked for below",
    "conf/  multirun_sweeps/  prompts/": "the map: its files are looked for below",
    "checkpoints/step_": "a checkpoint: its files are looked for below",
    "the command    __main__": "a picture of tests/test_imports.py's table",
    "rlreason/": "the packages: tests/test_layout.py looks for each",
    "Trainer.collect    RolloutPrefetcher": "the calls of one step, in words",
}
OFFLINE = {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}
COMMANDS = commands()
PYTHON = [block for block in blocks() if block.language == "python" and block.document not in ELSEWHERE]


def why_not(command: Command) -> str | None:
    return next((why for pattern, why in NOT_EXECUTED.items() if re.match(pattern, command.text)), None)


def run(argv: list[str], cwd: Path) -> None:
    """What is typed, in a new process and a home of its own, where `python` is the one that runs the tests."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = os.environ | starts.ENV | OFFLINE | {"PATH": path, "HOME": str(cwd)}
    done = subprocess.run(argv, cwd=cwd, env=env, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, f"{argv}\n{done.stdout}\n{done.stderr}"


def rlreason(*words: str, cwd: Path, n_runs: int = 1) -> str:
    """What a finished `python -m rlreason` has said; it may take minutes, the longer the more runs it starts."""
    done = starts.Started(*words, cwd=cwd, TRACKIO_DIR=str(cwd), **OFFLINE).finished(300 + 40 * n_runs)
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="session")
def real(tmp_path_factory) -> Mapping[str, str]:
    """What the placeholders of the documents stand for, made by real runs."""
    place = tmp_path_factory.mktemp("real")
    gsm8k = place / "gsm8k"
    gsm8k.mkdir()
    problems = make_stories(32, seed=0)
    for name, half in (("train", problems[:16]), ("test", problems[16:])):
        rows = [{"question": p.question, "answer": f"{p.solution}\n#### {p.answer}"} for p in half]
        (gsm8k / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    things = {"RUN": str(place / "run"), "GSM8K_DIR": str(gsm8k)}
    for words in (
        ["save_model=true", f"hydra.run.dir={place}/run"],
        ["algorithm=best_of_n", "n_list=[1,2]", f"hydra.run.dir={place}/best_1"],
    ):
        rlreason(*small(words, things), cwd=place)
    shutil.copytree(place / "run/model", place / "model")
    (place / "model/loss").mkdir()  # DIR is a model's folder, and one of options after --config-dir
    (place / "model/loss/mine.yaml").write_text("loss_type: grpo_clip\ncliprange: 0.1\n")
    things |= {f"TEAM_{n}": str(shutil.copytree(place / "model", place / f"team_{n}")) for n in (1, 2)}
    things |= {
        "BEST_OF_N_1": f"{place}/best_1",
        "BEST_OF_N_2": str(shutil.copytree(place / "best_1", place / "best_2")),
    }
    things |= compared(place)
    things |= {"PROGRAM": str(problem_named("kissing_11").folder / "examples/roots_220.py")}
    things |= {"DIR": str(place / "model"), "FILE": str(gsm8k / "train.jsonl")}
    things |= {"MATH_DIR": str(math(place / "math", problems)), "SHELL": "bash"}
    return things | {"first_hour/demo": things["RUN"]}  # a run of the notebook


def compared(place: Path) -> dict[str, str]:
    """Sweeps to compare, one of whose settings is surely better, and a file of results."""
    chance = {"no_baseline": 0.4, "reinforce_with_baseline": 0.8}
    for name in ("SWEEP", "SWEEP_A", "SWEEP_B"):
        of = {value: [right_answers(seed, chance[value]) for seed in range(4)] for value in chance}
        sweep(place / name, "loss", list(chance), lambda v, s, of=of: of[v][s], reference={"loss": "no_baseline"})
    rows = [f"{name},{seed},{p},{p % 2}" for name in "ab" for seed in range(3) for p in range(70)]
    (place / "results.csv").write_text("setting,seed,problem,correct\n" + "\n".join(rows) + "\n")
    things = {name: str(place / name) for name in ("SWEEP", "SWEEP_A", "SWEEP_B", "results.csv")}
    return things | {"runs/sweeps/grpo_learning_rate": things["SWEEP"]}


def math(folder: Path, problems: list[Problem]) -> Path:
    """A folder in the course's layout, with whole prompts and responses in sft.jsonl."""
    folder.mkdir()
    template = (ROOT / "prompts/r1_zero.prompt").read_text()
    rows = [
        {"problem": p.question, "solution": f"{p.solution} \\boxed{{{p.answer}}}", "answer": p.answer} for p in problems
    ]
    traces = [
        {
            "prompt": template.format(question=p.question),
            "response": f"{p.solution} </think> <answer>{p.answer}</answer>",
        }
        for p in problems[:16]
    ]
    for name, lines in (("train", rows[:16]), ("validation", rows[16:]), ("sft", traces)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_every_block_has_a_rule():
    """`text` is what a program prints; a block without a language is named in `SHOWN`."""
    for block in blocks():
        text = block.text.lstrip()
        shown = block.language == "text" or (not block.language and any(map(text.startswith, SHOWN)))
        executed = block.language in (*SHELLS, "python", "yaml", "toml")
        assert shown or executed, f"{block.place} {block.language}\n{block.text}"
        hidden = shown and re.search(r"^\s*[$%>]? ?(python|pip|rlreason|make|uv) ", text, re.M)
        assert not hidden, f"{block.place}: name the language of a command\n{block.text}"
    texts = [block.text.lstrip() for block in blocks()]
    assert not [start for start in SHOWN if not any(text.startswith(start) for text in texts)], "no longer shown"
    assert not [p for p in NOT_EXECUTED if not any(re.match(p, c.text) for c in COMMANDS)], "no longer written anywhere"


def test_every_command_of_the_readme_composes():
    """At their own size and with what they name, as far as Hydra can tell; the long tests run them all."""
    with composing(read([])):
        for command in COMMANDS:
            words = words_of(command.text)
            if not command.place.startswith("README") or why_not(command) or words is None or is_verb(words):
                continue
            try:
                words = [word for word in words if not word.startswith("resume=")]  # it brings those of its run
                asked = read(words)
                overrides, _ = without_sweep_words(asked.overrides, asked.multirun)
                ours = translated(overrides, note=lambda text: None)
                refuse_wrong_choices(ours)
                composed(fixed(ours), asked.config_name)
            except ConfigError as error:
                raise AssertionError(f"{command.place}: {command.text}") from error


@pytest.mark.long
@pytest.mark.parametrize("command", [c for c in COMMANDS if not why_not(c)], ids=lambda c: f"{c.place} {c.text}"[:90])
def test_a_command_does_what_it_says(command, real, tmp_path, monkeypatch):
    """The README's as typed, in processes of their own; most runs of other documents here, from the same words."""
    words, own = words_of(command.text), command.place.startswith("examples/") or "=my_" in command.text
    if own:
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(str(tmp_path))
        for example, mine in OWN.items():
            for name in (example, mine):
                shutil.copy(ROOT / f"examples/{example}.py", tmp_path / f"{name}.py")
    if words is None:
        if not shutil.which(command.shell):
            pytest.skip(f"{command.shell} is not installed")
        run([command.shell, "-c", with_real_things(command.text, real)], tmp_path)
        return
    if words[:1] == ["compare"]:
        words = [real[f"BEST_OF_N_{i}"] if word == "RUN" else word for i, word in enumerate(words)]
    words = [with_real_things(word, real) for word in words]
    if "--assignment" in words:
        (tmp_path / "runs").mkdir()  # which it gathers; tests/test_report_assignment.py fills it
    if "rollout=vllm" in words:
        pytest.importorskip("vllm")
    if any(word.startswith("resume=") for word in words):
        said = rlreason(*resumed(words, tmp_path), cwd=tmp_path)
        assert "goes on    from the end of step 1" in said
        assert json.loads((tmp_path / "resumed/status.json").read_text())["status"] == "finished"
        return
    if "algorithm=discover" in words or words[:2] == ["report", "runs/sweeps/kissing"]:
        of_discovery(words, tmp_path)
        return
    starts = not is_verb(words) and read(words).starts
    if starts:
        keep_the_rules(words, real)
    typed = small(words, real) if starts else words
    apart = own or any(word.startswith(("sweep=", "hydra.", "rollout=vllm")) for word in words)
    if starts and not apart and not command.place.startswith("README"):
        monkeypatch.chdir(tmp_path)
        for overrides in runs(typed):
            assert train(*overrides, quiet=True).status == "finished"
        return
    carried = [f"sweep={word.partition('=')[2]}" for word in words if word.startswith("carry=")]
    before = [small(["-m", sweep, "learning_rate=3e-4,1e-4", "seed=0"], real) for sweep in carried]  # 3e-4: reference
    n_runs = 0
    for each in [*before, typed]:
        n_runs += len(runs(each)) if starts else 0
        assert rlreason(*each, cwd=tmp_path, n_runs=n_runs)
    ends = [json.loads(path.read_text())["status"] for path in (tmp_path / "runs").rglob("summary.json")]
    assert len(ends) == n_runs
    assert set(ends) <= ({"finished", "diverged:accuracy"} if n_runs > 1 else {"finished"})  # sweeps have steep rates


def of_discovery(words: list[str], place: Path) -> None:
    """A command of discovery, asked of a server that answers by a script; with what its report reads."""
    asked = [["-m", "algorithm=discover", "seed=0", "sweep_name=kissing"], words] if words[0] == "report" else [words]
    with serving() as server:
        for one in asked:
            more = ["budget.calls=12"] if "algorithm=discover" in one else []
            env = {"cwd": place, "OPENAI_BASE_URL": server.base_url}
            done = starts.rlreason(*one, *more, **env)
            assert done.returncode == 0, done.stdout + done.stderr
    assert list(place.rglob("report.md"))
    assert list(place.rglob("score.png"))


@pytest.mark.long
@pytest.mark.parametrize("block", PYTHON, ids=lambda b: b.place)
def test_a_block_of_python_runs(block, real, tmp_path):
    """After the blocks that stand before it under its heading."""
    before = [b for b in PYTHON if (b.document, b.heading) == (block.document, block.heading) and b.line <= block.line]
    text = "\n".join(small_python(with_real_things(b.text, real), real) for b in before)
    (tmp_path / "block.py").write_text(text)
    run(["python", "block.py"], tmp_path)


def test_an_option_file_composes(tmp_path, monkeypatch):
    """At the path that the text names last before it, beside a module with the functions of its document."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    files = [block for block in blocks() if block.language == "yaml" and block.document not in ELSEWHERE]
    assert files
    for block in files:
        before = "\n".join(documents()[block.document].splitlines()[: block.line])
        folder, group, name = re.findall(r"`(\w+)/(\w+)/(\w+)\.yaml`", before)[-1]
        (tmp_path / folder / group).mkdir(parents=True)
        (tmp_path / folder / group / f"{name}.yaml").write_text(block.text)
        functions = [b.text for b in PYTHON if b.document == block.document and b.text.startswith("def ")]
        for module in re.findall(r"(\w+):\w", block.text):
            (tmp_path / f"{module}.py").write_text("\n".join(functions))
        with composing(asked := check_words(["--config-dir", folder, "--cfg=job", f"{group}={name}"])):
            cfg = compose("config", list(asked.overrides))
        numbers = {key: value for key, value in yaml.safe_load(block.text).items() if key != "defaults"}
        assert numbers
        assert {key: cfg[group][key] for key in numbers} == numbers


def test_the_entry_points_of_a_package_are_in_the_groups_that_are_read():
    for block in blocks():
        if block.language == "toml":
            assert set(tomllib.loads(block.text)["project"]["entry-points"]) == set(GROUPS.values())


@pytest.mark.long
def test_what_is_typed_before_tab_is_answered(real, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.md").touch()
    lines = typed_before_tab()
    assert len(lines) > 8
    assert not [line for line in lines if not answers(with_real_things(line, real))]


def shown(start: str) -> Block:
    return next(b for b in blocks() if b.text.startswith(start))


@pytest.mark.long
def test_a_run_leaves_what_is_shown(real):
    names = re.findall(r"\b\w+(?:\.\w+|/)(?= )", shown("runs/grpo/").text.partition("\n")[2])
    assert len(names) > 8
    of_some = {"log.txt", "own_functions.txt", "stacks.txt"}  # "if there are any"
    assert {name for name in names if not (Path(real["RUN"]) / name).exists()} <= of_some


@pytest.mark.long
def test_a_checkpoint_holds_what_is_shown(real):
    names = re.findall(r"^  (\S+)", shown("checkpoints/step_").text, re.M)
    (checkpoint,) = (Path(real["RUN"]) / "checkpoints").iterdir()
    assert {path.name for path in checkpoint.iterdir()} == {name.rstrip("/") for name in names}


@pytest.mark.long
def test_the_same_command_goes_on_where_a_run_was_killed(real, tmp_path):
    """As the README says of the command that it shows twice; tests/test_kills.py does it everywhere."""
    text = "python -m rlreason hydra.run.dir=runs/mine"
    assert shown(text).text.count(text) == 2
    words = [*small(words_of(text) or [], real), "n_steps=2"]
    for place, env in (("whole", {}), ("killed", {AT: "rlreason.trainer:Trainer.sync:call:2"})):
        (tmp_path / place).mkdir()
        first = starts.rlreason(*words, "checkpoint.every=1", cwd=tmp_path / place, **env)
        assert (first.returncode == 0) == (not env), first.stderr
    assert first.returncode == -9
    assert "goes on" in rlreason(*words, "checkpoint.every=1", cwd=tmp_path / "killed")
    assert differences(tmp_path / "whole/runs/mine", tmp_path / "killed/runs/mine") == []


def test_the_map_names_what_is_there():
    entries = re.findall(r"^ {0,2}((?:[\w.]+(?:/|\.py) +)+)", shown("conf/  multirun_sweeps/").text, re.M)
    names = [name for line in entries for name in line.split()]
    assert len(names) > 15
    assert not [name for name in names if not (ROOT / name).exists() and not (ROOT / "rlreason" / name).exists()]
