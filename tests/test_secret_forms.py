"""The forms in which a program or a log holds a secret, what resembles them, and where else a run hides one."""

import logging
import time
from types import SimpleNamespace

import pytest
import yaml

from rlreason.config.groups import LoggerConfig
from rlreason.engines.vllm.installation import hide_secrets, last_lines, log_into
from rlreason.records.loggers.base import Known
from rlreason.records.loggers.trackio_logger import names
from rlreason.records.loggers.wandb_logger import chosen
from rlreason.runtime.secrets import (
    HIDDEN,
    names_secret,
    plainly_redacted,
    redacted,
    redacted_settings,
    secret_values,
)

FORMS = [
    'os.environ["HF_TOKEN"] = "sword5fish"',
    'environ["WANDB_API_KEY"]="swordfish"',
    "cfg['api_key'] = 'swordfish'",
    'os.environ.setdefault("HF_TOKEN", "swordfish")',
    "headers=[('Authorization', 'swordfish')]",
    r'+    "os.environ[\"HF_TOKEN\"] = \"sword5fish\"\n",',  # a line of a notebook
    'API_KEY = """swordfish"""',
    "+API_KEY = '''\n+swordfish\n+'''",
    'api_key: str = "swordfish"',
    'api_key: str | None = "swordfish"',
    'self.client_secret = (\n    "swordfish"\n)',
    '+self.client_secret = (\n+    "swordfish"\n+)',
    '-self.client_secret = (\n-    "salmon and"\n-    "swordfish"\n-)',
    'API_KEY = \\\n    "swordfish"',
    'DB_PASSWORD = ("swordfish")',
    'DB_PASS = "swordfish"',
    "+DB_PASS=sword(fish;swordfish",
    'PASSWORD = f"swordfish"',
    'my_key = b"sword5fish"',
    'password = str("swordfish")',
    'api_key = SecretStr("swordfish")',
    'TOKENS = ["sword5fish"]',
    '+API_KEYS = [\n+    "herring and",\n+    "swordfish",\n+]',
    '{"Authorization": "Basic swordfish"}',
    '{"Authorization": "swordfish"}',
    "Authorization: token swordfish",
    "curl -H 'authorization: Basic swordfish'",
    """password = "it's swordfish" """,
    """password = 'a "swordfish" b'""",
    r'password = "a\"swordfish"',
    "https://swordfish@host/repo",
    "git+https://swordfish:@host/repo",
    "https://swordfish:x-oauth-basic@host/repo",
    "password: |\n  swordfish",
    "machine host login me password swordfish",
    "SLACK_WEBHOOK_URL='https://host/swordfish'",
]
NO_SECRETS = [
    "pass_rate = 'pass_rates.jsonl' # a first pass: something",
    "api_key = os.environ['API_KEY'] or os.environ.get('OTHER_API_KEY')",
    "API_KEY=os.environ['API_KEY']",
    "password = getpass.getpass('Password, please: ')",
    'headers = {"Authorization": f"Bearer {api_key}"}',
    "stop_tokens = ['<|endoftext|>', '</answer>']",
    "https://localhost:8080/a@b https://host.org?mail=someone@host",
    "path: str = 'somewhere/else'",
]
HOSTILE = [
    'token="', "token='", 'token="""', "token='''", r"token=\"", "token=[", "token=(\n+ ", "key=(((", 'key=["a",',
    'key=["abcdefg1",', "token: a=", "token: aaaaaaaa ", "('token',", "('token','", "http://a", "http://a:", "https://",
    "Authorization: Basic ", "authorization:", "login a password ", "TOKEN=\n", "\n", "\\", "token=\\\n", "token=|\n  ",
    "pypi-", "_TOKEN=a(", "token=str(", "token] = ", 'token"] = "', "token='a' \"b", "login ", "first\n", "key:a|",
]  # fmt: skip


@pytest.mark.parametrize("text", FORMS)
def test_a_secret_is_hidden_in_every_form(text):
    shown = redacted(text, {})
    assert "fish" not in shown
    assert HIDDEN in shown


@pytest.mark.parametrize("text", NO_SECRETS)
def test_what_resembles_a_form_is_left_alone(text):
    assert redacted(text, {}) == text


@pytest.mark.long
def test_hostile_text_takes_no_longer_the_longer_it_is():
    began = time.process_time()
    for odd in HOSTILE:
        redacted(odd * (300_000 // len(odd)), {"A_SECRET": "first\nsecond part"})
    assert time.process_time() - began < 15


def test_hiding_keeps_the_lines_of_a_difference():
    text = '+api_key = """\n+swordfish\n+swordfish\n+"""\n+TOKENS = [\n+    "sword5fish",\n+    "sword6fish",\n+]\n'
    shown = redacted(text, {})
    assert "fish" not in shown
    assert [line[0] for line in shown.splitlines()] == ["+"] * 8


def test_more_names_of_variables_are_secret():
    more = {
        "MYSQL_PWD": "secret-1", "PGPASS": "secret-2", "DB_PASS": "secret-3", "GITHUB_PAT": "secret-4",
        "DB_PASS_OF_TEST": "secret-5", "SLACK_WEBHOOK_URL": "https://host/secret-6",
    }  # fmt: skip
    plain = {"PWD": "/gone/away", "OLDPWD": "/gone/away", "PATH": "/bin:/usr/bin", "BYPASS": "whatever-1"}
    assert sorted(secret_values(more | plain)) == sorted(more.values())
    assert not names_secret("eval.pass_at_k")


@pytest.mark.parametrize(
    "secret", ["sword fish " * 20 + "end", "swordfish one\nswordfish two", "sword\n\n  fish, long"]
)
def test_a_secret_that_settings_fold_or_that_has_lines_is_hidden(secret):
    settings = {"group": {"note": f"it is {secret}"}, "seed": 1}
    for style in (None, "|", ">", '"'):
        text = yaml.safe_dump(settings, sort_keys=False, default_style=style)
        shown = redacted_settings(text, {"A_SECRET": secret})
        assert "fish" not in shown
        assert yaml.safe_load(shown)["group"] == {"note": f"it is {HIDDEN}"}


def test_a_secret_of_two_lines_is_hidden_in_a_difference_and_in_json():
    environ = {"A_SECRET": "first part\nother part"}
    assert plainly_redacted("+x = '''\n+first part\n+other part\n", environ) == f"+x = '''\n+{HIDDEN}\n"
    assert plainly_redacted(r'{"a": "first part\nother part"}', environ) == f'{{"a": "{HIDDEN}"}}'


def test_the_log_of_vllm_is_hidden_where_it_is_quoted_and_when_the_engine_has_ended(tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", "swordfish-5")
    log, said, logger = tmp_path / "vllm.log", list[str](), logging.getLogger("vllm")
    before = logger.handlers[:], logger.level, logger.propagate
    log.write_bytes(b"native \xff swordfish-5\nplain\n")
    assert "swordfish" not in last_lines(log)
    assert "plain" in last_lines(log)
    log_into(log)
    logger.warning("with %s", "swordfish-5")
    assert log.read_bytes().count(b"swordfish-5") == 1  # Python's lines are hidden as they are written
    hide_secrets(log, said.append)
    logger.warning("later")
    lines = log.read_bytes().splitlines()
    assert lines[:2] == [b"native \xff " + HIDDEN.encode(), b"plain"]
    assert [line.rpartition(b": ")[2] for line in lines[2:]] == [f"with {HIDDEN}".encode(), b"later"]
    file = log.stat().st_ino
    hide_secrets(log, said.append)
    assert log.stat().st_ino == file  # nothing to hide: left alone
    hide_secrets(tmp_path / "none.log", said.append)
    assert (said, [path.name for path in tmp_path.iterdir()]) == ([], ["vllm.log"])
    for handler in logger.handlers:
        handler.close()
    logger.handlers[:], logger.level, logger.propagate = before


def test_what_names_a_run_is_hidden_from_loggers(tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", "swordfish-6")
    folder = tmp_path / "run-swordfish-6"
    settings = LoggerConfig(wandb=True, group="g swordfish-6", tags=["a", "swordfish-6"], notes="is swordfish-6")
    own = SimpleNamespace(project=None, run_group=None, run_name=None, console="off", run_id=None, resume=None)
    given = chosen(settings, folder, own, {}, Known("id", goes_on=False))
    assert {key: given[key] for key in ("name", "group", "tags", "notes")} == {
        "name": f"run-{HIDDEN}", "group": f"g {HIDDEN}", "tags": ["a", HIDDEN], "notes": f"is {HIDDEN}",
    }  # fmt: skip
    assert names(settings, folder) == {"project": "rlreason", "name": f"run-{HIDDEN}", "group": f"g {HIDDEN}"}
