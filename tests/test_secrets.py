"""No password, key or token gets into a run folder: what is hidden, what is left alone, and a whole run around one."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rlreason.records.status import write_status
from rlreason.runtime.secrets import (
    HIDDEN,
    names_secret,
    plainly_redacted,
    redacted,
    redacted_leaves,
    redacted_settings,
    redacted_words,
    secret_values,
)
from tests.starts import ENV, ROOT, SMALL

# Put together here, so that nobody who looks for keys in this file finds one.
HEX, LETTERS = "0123456789abcdef" * 3, "aB3dE5gH" * 6
SHAPES = {
    "hugging face": "hf_" + LETTERS[:34],
    "openai": "sk-" + LETTERS,
    "openai project": "sk-proj-" + LETTERS,
    "anthropic": "sk-ant-" + "api03-" + LETTERS,
    "github": "ghp_" + LETTERS[:36],
    "github fine-grained": "github_pat_" + LETTERS,
    "aws": "AKIA" + "ABCDEFGH12345678",
    "google": "AIza" + LETTERS[:35],
    "slack": "xoxb-" + "123456789012-" + LETTERS[:20],
    "gitlab": "glpat-" + LETTERS[:20],
    "replicate": "r8_" + LETTERS[:37],
    "npm": "npm_" + LETTERS[:36],
    "pypi": "pypi-" + "AgEIcHlwaS5vcmc" + LETTERS,
    "nvidia": "nvapi-" + LETTERS,
    "stripe": "sk_live_" + LETTERS[:24],
    "slack hook": "https://hooks.slack.com/services/T0/B0/" + LETTERS[:24],
    "weights & biases, own server": "local-" + HEX[:40],
    "json web token": ".".join("eyJ" + LETTERS[:20] for _ in "ab") + "." + LETTERS,
    "pem": "-----BEGIN RSA PRIVATE KEY-----\n" + f"+{LETTERS}\n" * 3 + "-----END RSA PRIVATE KEY-----",
}


@pytest.mark.parametrize("token", SHAPES.values(), ids=SHAPES)
def test_a_token_of_a_known_shape_is_hidden_wherever_it_stands(token):
    for text in (token, f"x = f('{token}')", f"failed: {token}: no access", f"+{token}", f'{{"a": "{token}"}}'):
        for hide in (redacted, plainly_redacted):
            shown = hide(text, {})
            assert HIDDEN in shown
            assert not any(part in shown for part in token.split("-") if len(part) > 15), shown


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ('api_key = "swordfish"', "swordfish"),
        ("+WANDB_API_KEY=swordfish", "swordfish"),
        ("+export DB_PASSWORD='sword fish'", "sword fish"),
        ('{"client_secret": "swordfish"}', "swordfish"),
        ("password: swordfish", "swordfish"),
        ("openai.api_key = 'swordfish'", "swordfish"),
        ("hf download --token swordfish x", "swordfish"),
        ("--api-key=swordfish", "swordfish"),
        ("Authorization: Bearer swordfish1", "swordfish1"),
        ("git clone https://me:swordfish@host/repo", "swordfish"),
        ("postgres://:swordfish@host", "swordfish"),
        (f"wandb login {HEX[:40]}", HEX[:40]),
        ('token = "sword5fish"', "sword5fish"),
        ("-api_key: 'swordfish'", "swordfish"),
        ("url=https://host/?access_token=swordfish1", "swordfish1"),
        ("call(x=long_function(api_key='swordfish'))", "swordfish"),
    ],
)
def test_what_is_given_to_a_secret_name_is_hidden(text, secret):
    shown = redacted(text, {})
    assert secret not in shown
    assert HIDDEN in shown


@pytest.mark.parametrize(
    "text",
    [
        "sampling.max_tokens=48 micro_batch_tokens: 16384",
        "tokenizer.pad_token_id = tokenizer.eos_token_id",
        "eos_token: </s>",
        "rows.sort(key=natural_order)",
        "key = sampling_key(run)",
        "password = settings.password",
        "password = os.environ['PASSWORD']",
        "author: Somebody Else",
        f"commit {HEX[:40]}",
        "https://host/path?x=1 git@github.com:a/b",
        "risk-adjusted-advantages-of-long-names",
        "GIT_AUTHOR_NAME=Somebody-Else",
    ],
)
def test_what_is_no_secret_is_left_alone(text):
    assert redacted(text, {}) == text


def test_this_programs_own_source_is_hardly_touched():
    """It speaks of tokens and keys on every page, and a difference that is hidden is of no use to anybody."""
    for path in (ROOT / "rlreason").rglob("*.py"):
        lines = path.read_text("utf-8").splitlines()
        hidden = [line for line in lines if redacted(line, {}) != line]
        assert len(hidden) <= (10 if path.name == "secrets.py" else 1), f"{path}: {hidden}"


def test_the_environment_is_searched_by_names_and_paths_are_none():
    environ = {
        "OPENAI_API_KEY": "swordfish", "MY_PASSWORD": "a.b*c(d)", "SHORT_TOKEN": "1234567", "HF_TOKEN_PATH": "/",
        "TOKENIZERS_PARALLELISM": "somewhat", "HOME": "/home/user", "SSH_AUTH_SOCK": os.devnull,
    }  # fmt: skip
    assert secret_values(environ) == ["swordfish", "a.b*c(d)"]
    assert plainly_redacted("a.b*c(d) swordfish 1234567", environ) == f"{HIDDEN} {HIDDEN} 1234567"
    assert names_secret("AWS_SECRET_ACCESS_KEY")
    assert not names_secret("MONKEYS")


def test_words_keep_their_form():
    words = ["a.api_key=swordfish", "--token", "swordfish", "loss=gspo", "data.path=s3://me:swordfish@host", "-m"]
    shown = redacted_words(words, {})
    assert shown == [f"a.api_key={HIDDEN}", "--token", HIDDEN, "loss=gspo", f"data.path=s3://me:{HIDDEN}@host", "-m"]


def test_settings_read_back_with_the_same_names():
    settings = {"path": "https://me:swordfish@host", "limit": 1e-06, "note": ["ünï: swordfish-2", None, True]}
    text = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)
    environ = {"A_SECRET": "swordfish-2"}
    again = yaml.safe_load(redacted_settings(text, environ))
    assert again == {"path": f"https://me:{HIDDEN}@host", "limit": 1e-06, "note": [f"ünï: {HIDDEN}", None, True]}
    assert again == redacted_leaves(settings, environ)
    plain = "# as it was written\na: 1\n"
    assert redacted_settings(plain, environ) == plain


def test_the_reason_of_a_status_is_hidden(tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", "swordfish-3")
    write_status(tmp_path, "failed", "ValueError: swordfish-3 is refused")
    assert json.loads((tmp_path / "status.json").read_text())["reason"] == f"ValueError: {HIDDEN} is refused"


def test_the_log_hides_what_python_and_what_native_code_prints(tmp_path):
    program = f"""
import os, sys
from pathlib import Path
from rlreason.runtime.stderr_log import log_stderr_in, stderr_logged
with stderr_logged():
    print("early swordfish-4", file=sys.stderr)
    log_stderr_in(Path({str(tmp_path)!r}))
    print("a library says swordfish-4", file=sys.stderr)
    sys.stderr.flush()
    assert b"swordfish-4" not in Path({str(tmp_path / "log.txt")!r}).read_bytes()
    os.write(2, b"native \\xff swordfish-4\\n")
"""
    env = os.environ | {"SOME_TOKEN": "swordfish-4", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", program], env=env, check=True)
    text = (tmp_path / "log.txt").read_bytes()
    assert text == f"early {HIDDEN}\na library says {HIDDEN}\nnative ".encode() + b"\xff" + f" {HIDDEN}\n".encode()


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A git checkout of this program with a key in a tracked file and another in a file that git does not know."""
    root = tmp_path_factory.mktemp("checkout")
    for name in ("rlreason", "conf", "prompts"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    mine = root / "rlreason/runtime/mine.py"
    mine.write_text("NAME = 'mine'\n")
    for words in (["init", "-q"], ["add", "-A"], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "all"]):
        subprocess.run(["git", "-C", str(root), *words], check=True)
    mine.write_text(f"NAME = 'mine'\napi_key = 'tracked-swordfish'\ntoken = '{SHAPES['hugging face']}'\n")
    (root / ".env").write_text("SERVICE_PASSWORD=untracked-swordfish\n")
    return root


@pytest.mark.long
def test_a_run_keeps_no_secret_in_any_file(checkout, tmp_path):
    """Of the environment, of the checkout, of the command line, and of what a reward of the user's own says."""
    (tmp_path / "own_reward.py").write_text(
        "import os, sys\nPASSWORD = 'reward-swordfish'\n"
        "def judged(response, ground_truth):\n"
        "    print('asked', os.environ['SERVICE_TOKEN'], file=sys.stderr, flush=True)\n"
        "    return {'reward': 1.0}\n"
    )
    secret = {"SERVICE_TOKEN": "environment-swordfish", "WANDB_API_KEY": f"swordfish{HEX[:31]}"}
    env = os.environ | ENV | secret | {"PYTHONPATH": str(checkout)}
    words = [*SMALL, "prompt.reward=own_reward:judged", "logger=[wandb,tensorboard]", "logger.mode=offline"]
    words += [
        "model.cache=https://me:typed-swordfish@host",
        "hydra.job.name=environment-swordfish",
        "hydra.run.dir=run",
    ]
    argv = [sys.executable, "-m", "rlreason", *words]
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    names = {path.name for path in files}
    assert {"changes.patch", "provenance.json", "config.yaml", "own_functions.txt", "overrides.yaml"} <= names
    assert any(name.startswith("wandb-") or name.endswith(".wandb") for name in names), done.stdout
    for path in files:
        content = path.read_bytes()
        assert b"swordfish" not in content, path
        assert SHAPES["hugging face"].encode() not in content, path
    told = json.loads((tmp_path / "run/provenance.json").read_text())
    assert told["changes"]["untracked"] == [".env"]
    assert told["changes"]["files"] == ["rlreason/runtime/mine.py"]
    assert told["changes"]["secrets_hidden"] == 2
    assert told["commit"].endswith("+changes")
    assert f"api_key = '{HIDDEN}'" in (tmp_path / "run/changes.patch").read_text()
