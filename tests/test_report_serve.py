"""A served report: which files are given out, to whom, and that it is written again while runs go on."""

import http.client
import threading
import time

import pytest

from rlreason.errors import ConfigError
from rlreason.records.console import Console
from rlreason.report import serve
from rlreason.report.markdown import FILES


@pytest.fixture
def served(tmp_path):
    """A server of a folder with a report, some pictures, and things that are nobody's business."""
    out = tmp_path / "out"
    (out / FILES).mkdir(parents=True)
    (out / "report.html").write_text("<p>one")
    (out / "report.md").write_text("# one")
    (out / FILES / "a.svg").write_text("<svg/>")
    (out / "config.yaml").write_text("secret: 1")
    (out / FILES / "model.bin").write_text("x")
    (out / FILES / "link.svg").symlink_to(out / "config.yaml")
    server = serve.Server(out, "127.0.0.1", 0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def asked(server, path: str, host: str | None = None, method: str = "GET"):
    """(status, headers, body) of a request."""
    port = server.server_address[1]
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    connection.putrequest(method, path, skip_host=True)
    connection.putheader("Host", host or f"127.0.0.1:{port}")
    connection.endheaders()
    answer = connection.getresponse()
    return answer.status, dict(answer.getheaders()), answer.read()


def test_the_report_and_its_pictures_are_given_out_and_nothing_else(served):
    assert asked(served, "/")[2] == asked(served, "/report.html")[2] == b"<p>one"
    assert asked(served, "/report.md")[0] == asked(served, f"/{FILES}/a.svg")[0] == 200
    for path in (
        "/config.yaml",
        f"/{FILES}/model.bin",
        f"/{FILES}/link.svg",
        f"/{FILES}/../config.yaml",
        f"/{FILES}/..%2fconfig.yaml",
        "//config.yaml",
        "/" + "../" * 9 + "etc/passwd",
        f"/{FILES}",
        f"/{FILES}/b/a.svg",
        "/report.html/x",
    ):
        assert asked(served, path)[0] == 404, path
    assert asked(served, "/", method="HEAD")[2] == b""
    assert asked(served, "/", method="POST")[0] == 501


def test_a_foreign_host_is_sent_away(served):
    port = served.server_address[1]
    for host in ("evil.example", "evil.example:80", f"127.0.0.1.evil.example:{port}", "", "10.0.0.1"):
        status, _, body = asked(served, "/", host=host or " ")
        assert (status, b"one" in body) == (421, False), host
    for host in (f"localhost:{port}", "LOCALHOST", f"[::1]:{port}", "127.0.0.1"):
        assert asked(served, "/", host=host)[0] == 200, host


def test_headers_keep_the_page_to_itself_and_fresh(served):
    _, headers, _ = asked(served, "/")
    assert headers["Refresh"] == "10"
    assert (headers["X-Content-Type-Options"], headers["Cache-Control"]) == ("nosniff", "no-store")
    served.going_on = False
    assert "Refresh" not in asked(served, "/")[1]
    assert "default-src 'none'" in asked(served, f"/{FILES}/a.svg")[1]["Content-Security-Policy"]
    assert "Python" not in headers["Server"]


@pytest.mark.long
def test_it_is_written_again_when_runs_change_and_survives_any_error(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text("{}\n")
    said, written, stop = [], [], threading.Event()

    def rewrite() -> bool:
        written.append(time.monotonic())
        if len(written) == 2:
            raise RuntimeError("disk on fire")
        return False

    class Asked:
        going_on = True

    asked = [run], rewrite, Asked, said.append, stop, 0.05
    thread = threading.Thread(target=serve.keep_fresh, args=asked, daemon=True)
    thread.start()
    time.sleep(0.3)
    assert not written  # nothing has changed
    for n in (1, 2, 3):
        (run / "metrics.jsonl").write_text("{}\n" * (n + 1))
        end = time.monotonic() + 10
        while len(written) < n and time.monotonic() < end:
            time.sleep(0.02)
    stop.set()
    thread.join(600)
    assert len(written) == 3
    assert said == ["! the report could not be written again, the last one stays: disk on fire"]
    assert Asked.going_on is False


def test_a_port_that_is_taken_is_one_line(served, tmp_path):
    for port, says in ((served.server_address[1], "in use"), (99999, "is no port")):
        with pytest.raises(ConfigError, match=says):
            serve.serve([tmp_path], tmp_path, "127.0.0.1", port, bool, Console())
