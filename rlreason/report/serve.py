"""Serve a report that is written again while its runs go on: on this machine alone, unless told otherwise."""

import socket
import threading
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from rlreason.errors import ConfigError
from rlreason.records.console import Console
from rlreason.records.files import CONFIG, METRICS, STATUS, SUMMARY
from rlreason.report.markdown import FILES
from rlreason.runtime.text import first_line
from rlreason.runtime.verb import Answer
from rlreason.sweeps.state import FILE

LOOK_S = 5.0  # between two looks at the runs' files
LOOPBACK = ("127.0.0.1", "localhost", "::1")
TYPES = {".html": "text/html; charset=utf-8", ".md": "text/plain; charset=utf-8", ".svg": "image/svg+xml"}
#: The page's own policy stands in it; as a header it holds for the pictures and the Markdown too.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src 'self' data:; base-uri 'none'; form-action 'none'"
WATCHED = (CONFIG, METRICS, STATUS, SUMMARY, FILE)


class Server(ThreadingHTTPServer):
    """Serves a report's files from one folder to requests that name this host."""

    daemon_threads = True

    def __init__(self, out: Path, host: str, port: int) -> None:
        self.out, self.names = out, (*LOOPBACK, host)
        self.going_on = True  # runs are: the page asks again
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), Handler)

    @property
    def address(self) -> str:
        """Where a browser finds the report."""
        host, port = str(self.server_address[0]), int(self.server_address[1])
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/"


class Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD for the report, its Markdown and its pictures, and nothing else."""

    server: Server
    server_version, sys_version = "rlreason", ""

    def do_GET(self) -> None:
        """Send a file of the report."""
        self._answer(body=True)

    def do_HEAD(self) -> None:
        """Send its headers."""
        self._answer(body=False)

    def _answer(self, body: bool) -> None:
        host = self.headers.get("Host", "").strip()
        name = host.rpartition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]
        if name.lower() not in self.server.names:  # a foreign page that had its own name resolved to this address
            self._send(HTTPStatus.MISDIRECTED_REQUEST, b"not this host", "text/plain", body)
            return
        path = self._file()
        if path is None:
            self._send(HTTPStatus.NOT_FOUND, b"no such file", "text/plain", body)
            return
        self._send(HTTPStatus.OK, path.read_bytes(), TYPES[path.suffix], body)

    def _file(self) -> Path | None:
        """The file that is asked for; None where it is none of the report's."""
        asked = self.path.partition("?")[0]
        parts = [part for part in asked.split("/") if part] or ["report.html"]
        allowed = parts in (["report.html"], ["report.md"]) or (len(parts) == 2 and parts[0] == FILES)
        path = self.server.out.joinpath(*parts)
        if not allowed or path.suffix not in TYPES or path.is_symlink() or not path.is_file():
            return None
        return path

    def _send(self, status: HTTPStatus, content: bytes, kind: str, body: bool) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        if not kind.startswith("text/html"):
            self.send_header("Content-Security-Policy", POLICY)
        elif self.server.going_on:
            self.send_header("Refresh", str(int(2 * LOOK_S)))
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: requests are no news."""


def stamp_of(runs: Sequence[Path]) -> tuple[tuple[str, int, int], ...]:
    """What tells whether the files of runs have changed: names, times and sizes of those that a report reads."""
    found = []
    for given in runs:
        root = given if given.is_dir() else given.parent
        for pattern in ("", "*/"):
            for name in WATCHED:
                for path in root.glob(f"{pattern}{name}"):
                    try:
                        told = path.stat()
                    except OSError:  # gone between the two
                        continue
                    found.append((str(path), told.st_mtime_ns, told.st_size))
    return tuple(sorted(found))


def keep_fresh(
    runs: Sequence[Path],
    rewrite: Callable[[], bool],
    server: Server,
    say: Callable[[str], object],
    stop: threading.Event,
    every: float = LOOK_S,
) -> None:
    """Write the report again when files of its runs have changed, until `stop`; an error is said once, and survived.

    `rewrite` writes it and tells whether any run still goes on.
    """
    stamp, said = stamp_of(runs), ""
    while not stop.wait(every):
        now = stamp_of(runs)
        if now == stamp:
            continue
        stamp = now
        try:
            server.going_on = rewrite()
            said = ""
        except Exception as error:  # whatever it is, the report that was written stays
            told = f"! the report could not be written again, the last one stays: {first_line(error)}"
            if told != said:
                say(told)
            said = told


def serve(
    runs: Sequence[Path], out: Path, host: str, port: int, rewrite: Callable[[], bool], console: Console
) -> Answer:
    """Serve the report until Ctrl-C, writing it again as its runs go on. `ConfigError` where the port is taken."""
    try:
        server = Server(out, host, port)
    except OSError as error:
        raise ConfigError(f"--serve {port} on {host}: {error.strerror}: give another port or --host") from None
    except OverflowError:
        raise ConfigError(f"--serve {port} is no port: give one of 0 to 65535") from None
    console.say(f"report: {server.address} (Ctrl-C ends it)")
    if host not in LOOPBACK:
        console.say(f"! --host {host}: whoever reaches this address reads the report, responses and all")
    stop, began = threading.Event(), time.monotonic()
    keeper = threading.Thread(target=keep_fresh, args=(runs, rewrite, server, console.say, stop), daemon=True)
    keeper.start()
    try:
        server.serve_forever(poll_interval=0.2)
    except KeyboardInterrupt:
        pass
    finally:
        stop.set()
        server.server_close()
    return Answer(f"served for {time.monotonic() - began:.0f} s", {"address": server.address})
