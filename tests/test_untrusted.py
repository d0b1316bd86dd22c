"""What models and data say is shown, and never obeyed, evaluated or executed by a terminal, Python or a library."""

import ast
import json
import os
import pickle
import pty
import re
import shutil
import subprocess
import sys
import unicodedata
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlreason import train
from rlreason.errors import ConfigError
from rlreason.model.chat import Chat
from rlreason.model.parameters import build_model, build_tokenizer
from rlreason.model.policy import Policy, load_policy
from rlreason.records.files import opened
from rlreason.records.training_curves import picture
from rlreason.runtime.streams import LINE_ANEW, LogStream
from rlreason.runtime.text import visible
from tests.starts import subcommand

ROOT = Path(__file__).parents[1]
HOSTILE = "\x1b]0;title\x07", "\x1b[2J", "a\rb", "\u202e", "\0", "\x9b31m", "\u2028"
ALL = " ".join(HOSTILE)
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def obeyed_in(written: str) -> list[str]:
    """What a terminal would obey in what was written, but for our own codes and ends of lines."""
    return OBEYED.findall(written.replace(LINE_ANEW, "").replace("\r\n", "\n"))


@given(st.text(st.characters() | st.sampled_from(ALL)))
def test_no_control_character_is_left_and_nothing_else_is_touched(text):
    """Bug: a sequence that hides in ordinary text, or an end of a line that is shown as one."""
    shown = visible(text)
    assert not [c for c in shown if unicodedata.category(c) == "Cc" and c not in "\n\t"] + OBEYED.findall(shown)
    assert visible(shown) == shown
    assert shown == text or OBEYED.search(text)


SAYS = f"""
import sys, time
from rlreason.records.console import exit_code_of
from rlreason.errors import ConfigError
from rlreason.records.console import Console
from rlreason.runtime.streams import print_stderr
hostile = {ALL!r}

def command():
    console = Console()
    console.shown_after_s = 0.1
    console.say(hostile)
    console.table(hostile)
    with console.wait(hostile, more=lambda: hostile) as wait:
        console.part(hostile)
        while not wait.shown:
            time.sleep(0.05)
    print_stderr(hostile)
    print(hostile)
    Console(out=sys.stderr).table('on standard error')
    raise ConfigError(hostile)

sys.exit(exit_code_of(command))
"""


def test_every_way_to_the_terminal_shows_what_others_wrote():
    """Bug: one way of printing that passes on what it was given."""
    ours, theirs = pty.openpty()
    env, parts = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "100"}, []
    with subprocess.Popen([sys.executable, "-c", SAYS], env=env, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        with suppress(OSError):  # the end of a terminal
            while part := os.read(ours, 1 << 16):
                parts.append(part)
    os.close(ours)
    written = b"".join(parts).decode()
    assert (process.returncode, obeyed_in(written)) == (2, [])
    assert written.count(r"\x1b]0;title\x07") >= 7
    assert written.count(LINE_ANEW) >= 4  # our own code is still one
    assert f"{LINE_ANEW}on standard error" in written
    assert written.count(visible("a\rb \u202e \0")) >= 5


def test_pictures_and_logs_of_a_run_can_be_read_in_a_terminal(tmp_path, recwarn):
    """Bug: a label that matplotlib reads as a formula; a library's text in the log."""
    with picture(tmp_path / "a.svg", f"run $x{ALL}", (4, 3)) as ax:
        ax.plot([1, 2], label=f"$\\frac {ALL}")
        ax.legend()
    assert not OBEYED.search((tmp_path / "a.svg").read_text())
    assert not list(recwarn)
    with (tmp_path / "log").open("wb") as log, LogStream(log.fileno()) as noise:
        print(f"a library says {ALL}\nloading 1%\rloading 2%\r", file=noise)
    written = (tmp_path / "log").read_bytes().decode()
    assert (obeyed_in(written), "loading 1%\nloading 2%\n" in written) == ([], True)


def test_a_run_and_inspect_show_what_its_model_and_its_data_say(tmp_path, monkeypatch, capsys):
    """Bug: a record of a run that holds a secret or an obeyed sequence, from a model whose vocabulary has them."""
    tokenizer = build_tokenizer(["How many? 12 a b c"], 300)
    tokenizer.add_tokens([text * times for text in HOSTILE for times in range(1, 13)])
    Policy(build_model(len(tokenizer), 16, 1, 2, seed=0), tokenizer).save(tmp_path / "model")
    for half in ("train", "validation"):
        rows = [{"question": f"{half} {i}+1? {ALL} ${{oc.env:HOME}} {{0}}", "answer": f"{half}{i}"} for i in range(12)]
        (tmp_path / f"{half}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [
        "model=local", "model.path=model", "data=jsonl", "data.path=.", "prompt=question_only", "n_steps=1",
        "rollout_batch_size=16", "group_size=4", "eval_problems=8", "sampling.max_tokens=16", "checkpoint.every=1",
        "hydra.run.dir=out", "threads=1",
    ]  # fmt: skip
    secret = "hf_" + "Secret7" * 5
    monkeypatch.setenv("MY_API_KEY", secret)
    monkeypatch.chdir(tmp_path)
    folder = train(*words).folder
    written = "".join(capsys.readouterr())
    assert secret not in written
    responses = [json.loads(line)["response"] for file in (folder / "rollouts").iterdir() for line in opened(file)]
    assert all(any(text in response for response in responses) for text in HOSTILE)  # as they were
    assert (obeyed_in(written), r"\x1b[2J" in written) == ([], True)
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert {"metrics.jsonl", "summary.json", "config.yaml", "state.json"} <= {path.name for path in files}
    for path in files:
        if path.suffix in (".md", ".yaml", ".txt", ".json", ".jsonl", ".log") and not path.name.startswith("tokenizer"):
            assert obeyed_in(path.read_bytes().decode()) == [], path  # but in the model's own files, as they were
    row = json.loads(opened(next((folder / "evals").iterdir())).readline())
    assert row["question"].endswith("${oc.env:HOME} {0}")  # a question is no setting
    assert "oc.env" not in (folder / "config.yaml").read_text()
    for words in ([], ["--rollouts"], ["--category", "disagree"], ["--regrade", "--write"], ["--json"]):
        assert subcommand("inspect", folder, *words) == 0
        out, err = capsys.readouterr()
        assert obeyed_in(out + err) == []
    assert ALL in json.loads(out)["cases"][0]["question"]
    for file in (folder / "inspect.md", *folder.rglob("*.jsonl*")):
        assert obeyed_in(opened(file).read().decode()) == []  # JSON has escapes of its own


class Bomb:
    """A pickle that does something when it is read."""

    def __init__(self, target: Path) -> None:
        self.command = f"touch '{target}'"

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


@pytest.fixture
def planted(policy, tmp_path, monkeypatch) -> Path:
    """A folder with the model `good`; it may never hold `BOOM`."""
    pickle.loads(pickle.dumps(Bomb(tmp_path / "bomb")))  # or these tests would prove nothing
    assert (tmp_path / "bomb").exists()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    policy.save(tmp_path / "good")
    return tmp_path


def refused(path: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_policy(path)
    assert not Path("BOOM").exists()
    (line,) = str(caught.value).splitlines()
    return line


def test_weights_that_are_a_pickle_are_not_read(planted):
    """Bug: torch.load of what stands next to an adapter."""
    shutil.copytree("good", "adapter")
    Path("good/model.safetensors").unlink()
    settings = {"peft_type": "LORA", "base_model_name_or_path": "good", "r": 2, "target_modules": ["q_proj"]}
    Path("adapter/adapter_config.json").write_text(json.dumps(settings))
    for name, says in (("good/pytorch_model.bin", "pickle"), ("adapter/adapter_model.bin", "adapter_config.json")):
        torch.save({"weight": Bomb(planted / "BOOM")}, name)
        assert says in refused(Path(name).parts[0])


def test_a_program_in_a_model_folder_is_not_run(planted):
    """Bug: trust_remote_code at one of several loads."""

    def changed(file: str, **values: Any) -> None:
        Path(file).write_text(json.dumps(json.loads(Path(file).read_text()) | values))

    Path("good/evil.py").write_text("open('BOOM', 'w')\nclass C: pass\nclass M: pass\nclass T: pass\n")
    changed("good/config.json", auto_map={"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"})
    changed("good/tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.T", "evil.T"]})
    shutil.copytree("good", "other")
    assert type(load_policy("good").model).__name__ == "LlamaForCausalLM"  # of a family that transformers has
    changed("other/config.json", model_type="evil", architectures=["M"])
    assert "a program of its own" in refused("other")


def test_a_chat_template_reaches_nothing_of_python(tmp_path, monkeypatch):
    """Bug: a template of a model outside the sandbox, or without a bound."""
    monkeypatch.chdir(tmp_path)
    tokenizer = build_tokenizer(["How many?"], 300)
    for template in (
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('touch BOOM') }}",
        "{{ range(10 ** 9) | list }}",
    ):
        tokenizer.chat_template = template
        with pytest.raises(ConfigError, match=r"this model's chat template (refuses that|leaves)"):
            Chat(tokenizer).check()
    assert not list(tmp_path.iterdir())


FORBIDDEN = {
    "eval", "exec", "compile", "__import__", "pickle.loads", "pickle.load", "marshal.loads", "marshal.load",
    "dill.load", "shelve.open", "joblib.load", "cloudpickle.loads", "torch.load", "numpy.load", "np.load", "yaml.load",
    "yaml.full_load", "yaml.unsafe_load", "os.system", "os.popen", "pandas.read_pickle", "sympy.sympify", "parse_expr",
}  # fmt: skip
ALLOWED = {
    ("grading/pool.py", "cloudpickle.loads"),  # a reward of the caller's own, from its parent process
    ("sweeps/launcher.py", "cloudpickle.loads"),  # a job of a sweep, from the sweep's own process
    ("config/rules.py", "eval"),  # conditions, which stand in the code of fields
    *(("discovery/inside.py", call) for call in ("compile", "exec")),  # a model's program, in the sandbox
}


def test_nothing_in_the_package_evaluates_text_or_reads_a_pickle():
    """Bug: a new call that runs a text as a program."""
    found, last = set(), {call.rpartition(".")[2] for call in FORBIDDEN} | {"from_pretrained"}
    for path in sorted((ROOT / "rlreason").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.keyword) and node.arg in ("shell", "trust_remote_code", "allow_pickle"):
                assert ast.unparse(node.value) == "False", f"{path}:{node.value.lineno}"
            if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in last:
                called, given = ast.unparse(node.func), ast.unparse(node)
                if called in FORBIDDEN:
                    found.add((str(path.relative_to(ROOT / "rlreason")), called))
                if called.endswith(".from_pretrained"):
                    assert "trust_remote_code=False" in given or "NOTHING_RUNS" in given, f"{path}:{node.lineno}"
    assert found == ALLOWED
