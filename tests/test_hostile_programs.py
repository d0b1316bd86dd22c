"""Programs that try to fool, break or outlive the verifier of discovery: the right verdicts, and nothing left behind.

The programs are the files of hostile_programs/ (text, so that no tool ever imports one) and those of `GENERATED`. The
head of each says what it tries and which verdicts are right:

    # tries: one line
    # expect: valid 22 or type           (a valid set of 22 points, or none and this kind of error; invalid: any kind)
    # alone: exception                   (right, too, where neither bwrap nor unshare works)
    # timeout: 3                         (seconds; what is no limit of it is 60)
    # memory: 256                        (MB; 1000)
    # runs: 2                            (times in a row, with the same verdict; 1)

Each is scored in the best sandbox that works here and, marked long, in the others. A program that tries to reach
something gives two points where it does, and 22 where it does not.
"""

import contextlib
import ctypes
import hashlib
import json
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import psutil
import pytest

from tests.some import some
from tests.waiting import MINUTES

ROOT = Path(__file__).resolve().parents[1]
FOLDER = Path(__file__).with_name("hostile_programs")
PROBLEM = "kissing_11"
KINDS = {
    "exception", "exit", "timeout", "memory", "output", "disk", "processes", "no_points", "type", "size", "channel",
    "program", "empty", "ragged", "dimension", "zero_vector", "too_close", "alarm",
}  # fmt: skip
CHECK_TIMEOUT_S = 60.0
SLACK_S = 120.0  # beyond a program's own limit: for starting, ending, and a busy machine
SCORERS = 2
#: Characters that steer a terminal, turn the direction of writing, or are read by a model and not by a person.
UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufe00-\ufe0f\ufeff"
    "\U000e0000-\U000e0fff]"
)
SECRETS = ("canary-environment-5f1c7a", "canary-file-9b02de", "canary-argument-77aa31")
LISTENER = "\0rlreason-hostile-listener"  # no name in the file system; network_unix_sockets knows it
HONEST = b"points = [[2 * s * (i == j) for j in range(11)] for i in range(11) for s in (1, -1)]\n"
ROWS = b"# points\n" + HONEST


class Hostile(NamedTuple):
    """A program, and which verdicts on it are right."""

    name: str
    source: bytes
    expect: str
    timeout_s: float = 60
    memory_mb: int = 1000
    runs: int = 1
    alone: str = ""


def shipped() -> Iterator[Hostile]:
    """The programs of the folder, with what their heads say."""
    for path in sorted(FOLDER.glob("*.py.txt")):
        source = path.read_bytes()
        head = dict(re.findall(r"# (\w+): (.+)", "\n".join(source.decode().splitlines()[:6])))
        limits = float(head.get("timeout", 60)), int(head.get("memory", 1000)), int(head.get("runs", 1))
        yield Hostile(path.name.removesuffix(".py.txt"), source, head["expect"], *limits, head.get("alone", ""))


#: Programs whose sources no text file holds: broken, in other encodings, too long, too deep.
GENERATED = [
    Hostile("source_empty", b"", "no_points"),
    Hostile("source_nul_bytes", HONEST + b"\x00" * 10, "exception or program"),
    Hostile("source_not_utf8", b"name = 'caf\xe9 \xff\xfe'\n" + HONEST, "exception or program"),
    Hostile("source_byte_order_mark", b"\xef\xbb\xbf" + HONEST, "valid 22"),
    Hostile("source_other_ends_of_lines", ROWS.replace(b"\n", b"\r\n"), "valid 22"),
    Hostile("source_of_five_megabytes", HONEST + b"#" * 5 * 2**20, "program or valid 22 or size"),
    Hostile("source_deep_brackets", b"points = " + b"(" * 50_000 + b")" * 50_000, "exception or exit or memory"),
    Hostile("source_folded_constant", b"points = 'x' * 10**10\n", "memory or exception or type", memory_mb=256),
    Hostile("source_power_of_constants", b"points = 9**9**9\n", "timeout or memory", timeout_s=1),
    Hostile("source_reversed_by_marks", "# \u202e } ⁦if admin⁩ ⁦ begin\n".encode() + HONEST, "valid 22"),
]
PROGRAMS = [*shipped(), *GENERATED]
#: Programs with the sandbox that they are scored in, the empty one being the best that works.
IN_THE_BEST = [((program, ""),) for program in PROGRAMS]
IN_OTHERS = [((program, sandbox),) for program in PROGRAMS for sandbox in ("unshare", "limits")]


class Scorer:
    """An evaluator's process of its own, which programs may end, stop or fool: there are secrets all around it.

    Whatever a program starts stays below it, as it takes in all orphans.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("home/.ssh", "temporary", "working"):
            (folder / name).mkdir(parents=True)
        for name in ("home/.ssh/id_rsa", "home/.netrc", "working/.env", "working/notes.txt", ".env"):
            (folder / name).write_text(f"OPENAI_API_KEY={SECRETS[1]}\n")
        self.before = names_below(folder)
        self.start()

    def start(self) -> None:
        own = {"OPENAI_API_KEY": SECRETS[0], "HOME": str(self.folder / "home"), "PYTHONPATH": str(ROOT)}
        env, pipe = {**os.environ, **own, "TMPDIR": str(self.folder / "temporary")}, subprocess.PIPE
        command, where = [sys.executable, __file__, SECRETS[2]], self.folder / "working"
        streams = {"stdin": pipe, "stdout": pipe, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(command, env=env, cwd=where, text=True, start_new_session=True, **streams)

    def score(self, program: Hostile, sandbox: str) -> dict[str, Any]:
        """Score a program and wait for the answer within its limit: with `left`, what is left after a moment."""
        source = self.folder / "program.source"
        source.write_bytes(program.source)
        asked, told = [str(source), program.timeout_s, program.memory_mb, sandbox], dict[str, Any]()
        with contextlib.suppress(OSError, ValueError), selectors.DefaultSelector() as selector:
            self.process.stdin.write(json.dumps(asked) + "\n")
            self.process.stdin.flush()
            selector.register(self.process.stdout, selectors.EVENT_READ)
            told = json.loads(self.process.stdout.readline() if selector.select(program.timeout_s + MINUTES) else "")
        left = ["its own source was changed"] if source.read_bytes() != program.source else []
        until = time.monotonic() + 20
        while (living := self.living()) and time.monotonic() < until:
            time.sleep(0.02)
        new = sorted(names_below(self.folder) - self.before - {"program.source"})
        for name in new:
            removed(self.folder / name)
        left += [*(f"process {child}" for child in living), *new[:20], *marks()]
        if not told or left:
            self.close()
            self.start()
        return {"failure": "" if told else "the evaluator ended, stopped or did not answer", **told, "left": left}

    def living(self) -> list[psutil.Process]:
        """All processes below the evaluator's, without dead ones that nobody has asked for."""
        found = []
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    found += [child] if child.status() != psutil.STATUS_ZOMBIE else []
        return found

    def close(self) -> None:
        """End the process and all below it."""
        for child in self.living():
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        self.process.kill()
        self.process.communicate()


def names_below(folder: Path) -> set[str]:
    """Every file and folder below one, as deep as paths go."""
    names = (os.path.join(place, name) for place, *below in os.walk(folder) for name in (*below[0], *below[1]))
    return {os.path.relpath(name, folder) for name in names}


def marks() -> list[str]:
    """Files that hostile programs left where others would find them; they are removed, so that each is told once."""
    folders = {"/", "/tmp", "/var/tmp", "/dev/shm", "/dev/mqueue", "/run", "/run/lock", "/etc", "/usr/bin", str(ROOT)}
    folders |= {"/usr/local/lib", "/opt", "/sys/fs/cgroup", "/etc/cron.d", os.path.expanduser("~"), os.getcwd()}
    folders |= {*filter(None, sys.path), *sysconfig.get_paths().values(), sys.prefix, sys.base_prefix}
    folders |= {os.path.dirname(os.__file__) + tail for tail in ("", "/__pycache__", "/json/__pycache__")}
    found = []
    for folder in sorted(folders):
        with contextlib.suppress(OSError):
            found += [os.path.join(folder, name) for name in os.listdir(folder) if re.search("hostile[-_]mark", name)]
    for path in found:
        removed(Path(path))
    return found


def removed(path: Path) -> None:
    subprocess.run(["rm", "-rf", "--", str(path)], check=False, stderr=subprocess.DEVNULL)


def shared_memory() -> set[str]:
    """What the system knows of System V segments of 20 MB, sets of 100 semaphores and queues with much in them."""
    found = set()
    for kind, least in (("shm", 20 * 2**20), ("sem", 100), ("msg", 10_000)):
        with contextlib.suppress(OSError):
            rows = [line.split() for line in Path(f"/proc/sysvipc/{kind}").read_text().splitlines()[1:]]
            found |= {f"{kind} {words[1]}" for words in rows if int(words[3]) >= least}
    return found


BEFORE = shared_memory()


@pytest.fixture(scope="module")
def listener() -> Iterator[list[socket.socket]]:
    """Servers of this machine that no program may reach."""
    tcp, nameless = socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX)
    with contextlib.suppress(OSError):  # another test process has it
        nameless.bind(LISTENER)
        nameless.listen()
    with tcp, nameless:
        for server in (tcp, nameless):
            server.setblocking(False)
        yield [tcp, nameless]


@pytest.fixture(scope="module")
def scored(request, tmp_path_factory, listener):
    """What became of every program in every sandbox that is asked for, two at a time: a future for each."""
    items = [item for item in request.session.items if item.name.startswith("test_a_hostile_program")]
    made, free = [Scorer(tmp_path_factory.mktemp("scorer")) for _ in range(SCORERS)], SimpleQueue[Scorer]()
    for scorer in made:
        free.put(scorer)

    def told(program: Hostile, sandbox: str) -> list[dict[str, Any]]:
        scorer = free.get()
        try:
            return [scorer.score(program, sandbox) for _ in range(program.runs)]
        finally:
            free.put(scorer)

    with ThreadPoolExecutor(SCORERS) as pool:
        yield {item.callspec.params["case"]: pool.submit(told, *item.callspec.params["case"]) for item in items}
        pool.shutdown(cancel_futures=True)
    for scorer in made:
        scorer.close()


@pytest.mark.parametrize(
    "case", [*some(IN_THE_BEST, 40), *some(IN_OTHERS, 201)], ids=lambda case: f"{case[0].name}-{case[1]}".strip("-")
)
def test_a_hostile_program_gets_the_right_verdict_in_time_and_leaves_nothing(case, scored) -> None:
    """A score that was not earned, a process, file or secret that got out, or an evaluator that did not survive."""
    program, _ = case
    for told in scored[case].result():
        if told["failure"].startswith("ConfigError: no program can be held back"):
            pytest.skip(told["failure"])
        assert (told["failure"], told["left"]) == ("", [])
        score, right = told["score"], program.expect.split(" or ")
        if not {"bwrap", "unshare"} & {*score["protections"]}:
            right.append(program.alone)
        right += KINDS if "invalid" in right else []
        is_valid = score["validity"] == 1.0
        assert (f"valid {score['num_points']}" if is_valid else score["error_kind"]) in right, score["error"]
        assert told["seconds"] < program.timeout_s + (CHECK_TIMEOUT_S if score["check_seconds"] else 0) + SLACK_S
        # every score is consistent, bounded, fit to be shown, and without secrets
        assert (score["problem"], score["program_sha256"]) == (PROBLEM, hashlib.sha256(program.source).hexdigest())
        if is_valid:
            assert score["num_points"] == score["score"] == score["raw_points"] > 0
            assert (score["error"], score["error_kind"], score["dimension"]) == (None, None, 11)
        else:
            assert (score["validity"], score["num_points"], score["score"], bool(score["error"])) == (0.0, 0, 0, True)
            assert score["error_kind"] in KINDS
        text = json.dumps(score, ensure_ascii=False)
        text.encode()
        assert not any(secret in text or secret[::-1] in text for secret in SECRETS)
        for shown in (score["error"] or "", score["output_tail"]):
            assert (len(shown) <= 5000, UNSEEN.search(shown)) == (True, None)


def test_nothing_of_hostile_programs_lies_about_the_machine(scored, listener) -> None:
    """What belongs to no program alone: memory without an owner, connections, changed sources."""
    for future in scored.values():
        future.result()
    assert shared_memory() <= BEFORE
    for server in listener:
        with pytest.raises((BlockingIOError, OSError)):
            server.accept()
    folders = {*filter(os.path.isdir, sys.path), *sysconfig.get_paths().values()}
    planted = [Path(folder, f"{name}.py") for folder in folders for name in ("sitecustomize", "usercustomize", "numpy")]
    sources = [*(ROOT / "rlreason").rglob("*.py"), Path(os.__file__), Path(json.__file__), *planted]
    assert [str(path) for path in sources if path.exists() and b"hostile-mark" in path.read_bytes()] == []


def serve() -> None:
    """The evaluator's process: a line of JSON asks, a line of JSON answers."""
    from rlreason.config.algorithms import ScoreConfig
    from rlreason.discovery import sandbox
    from rlreason.discovery.score import problem_named, score_program

    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # orphans come to this process and not to the system's first
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    problem, every, before = problem_named(PROBLEM), sandbox.SANDBOXES, ""
    for line in sys.stdin:
        (path, timeout_s, memory_mb, wanted), began = json.loads(line), time.monotonic()
        limits = ScoreConfig(timeout_s, CHECK_TIMEOUT_S, memory_mb, cpus=4)
        if wanted != before:
            sandbox.SANDBOXES, before = tuple(one for one in every if one.startswith(wanted)), wanted
            sandbox.sandbox_here.cache_clear()
        try:
            told: dict[str, Any] = {"score": score_program(Path(path).read_bytes(), problem, limits)}
        except Exception as error:
            told = {"failure": f"{type(error).__name__}: {error}"}
        print(json.dumps({**told, "seconds": time.monotonic() - began}), flush=True)


if __name__ == "__main__":
    serve()
