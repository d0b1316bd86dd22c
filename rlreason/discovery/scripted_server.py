"""A server on this computer that answers by a script as a model's server would: for tests, and to try a run by.

    python -m rlreason.discovery.scripted_server [SCRIPT.json] [--port 8765]

It prints its base_url and ends at Ctrl-C. Requests whose id has the form RUN-TURN.SAMPLE.ATTEMPT are answered by
these numbers, so that requests side by side get the same answers each time; others in the order in which they arrive.
"""

import argparse
import json
import re
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from typing import Any

from rlreason.discovery.scripted_replies import MODEL, Answer, Script, completion, read_script, script_file
from rlreason.discovery.scripted_run import DEFAULT
from rlreason.errors import ConfigError
from rlreason.runtime.signals import stoppable

HOST, PORT = "127.0.0.1", 8765
LARGEST_REQUEST = 64 * 2**20  # bytes
_NUMBERS = re.compile(r"-(\d{1,9})\.(\d{1,9})\.(\d{1,9})$")


@dataclass(frozen=True)
class Request:
    """A question that came in: the client's id of it, the messages, and all of its body and headers."""

    id: str
    messages: list[Any]
    body: dict[str, Any]
    headers: dict[str, str]  # by lower-case names


class ScriptedServer(ThreadingHTTPServer):
    """Answers POST /v1/chat/completions by a script and GET /v1/models with one name, on the loopback address alone."""

    daemon_threads = False  # its end waits for them,
    block_on_close = True
    request_queue_size = 128

    def __init__(self, script: Script, port: int = 0) -> None:
        self.script = script
        self.stopping = threading.Event()
        self._requests: list[Request] = []
        self._connections: set[socket.socket] = set()
        self._guard = threading.Lock()
        super().__init__((HOST, port), _Handler)

    def server_bind(self) -> None:
        """Bind to the port, without looking up this computer's name as the base class does."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = HOST, int(self.server_address[1])

    @property
    def base_url(self) -> str:
        """Where a client finds it."""
        return f"http://{HOST}:{self.server_port}/v1"

    @property
    def requests(self) -> list[Request]:
        """What came in so far, in the order of arrival."""
        with self._guard:
            return list(self._requests)

    def answer_to(self, request: Request) -> Answer:
        """Note a question, and choose its answer."""
        with self._guard:
            number = len(self._requests)
            self._requests.append(request)
        found = _NUMBERS.search(request.id)
        return self.script.to(*map(int, found.groups())) if found else self.script.arriving(number)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread of its own, and know the connection."""
        with self._guard:
            self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """End a connection."""
        with self._guard:
            self._connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing where a client has gone; anything else is shown as the base class does."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)

    def server_close(self) -> None:
        """End every connection, and wait for the threads that answered them."""
        self.stopping.set()  # answers that take their time
        with self._guard:
            for connection in self._connections:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        super().server_close()


@contextmanager
def serving(script: Any = None, port: int = 0, folder: Path = Path()) -> Iterator[ScriptedServer]:
    """A server within a block: its `base_url`, and the `requests` that came in. No thread is left behind.

    `script`: what a script's JSON says (None: the one that ships). `port` 0: any free one. `folder`: of its programs.
    """
    with ScriptedServer(read_script(DEFAULT if script is None else script, folder), port) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.stopping.set()
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: ScriptedServer
    server_version, sys_version = "scripted", ""
    timeout = 30.0  # seconds for a client to send its request

    def do_GET(self) -> None:
        if self.path.partition("?")[0] == "/v1/models":
            model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "rlreason"}
            self._send_json(200, {"object": "list", "data": [model]})
        else:
            self._send_json(404, _error(f"no such path: {self.path}"))

    def do_POST(self) -> None:
        if self.path.partition("?")[0] != "/v1/chat/completions":
            self._send_json(404, _error(f"no such path: {self.path}"))
            return
        length = self.headers.get("Content-Length", "")
        try:
            size = int(length)
            body = json.loads(self.rfile.read(size)) if 0 <= size <= LARGEST_REQUEST else None
        except (ValueError, RecursionError):
            body = None
        if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
            self._send_json(400, _error("the body is no JSON with messages"))
            return
        headers = {name.lower(): value for name, value in self.headers.items()}
        request = Request(headers.get("x-client-request-id", ""), body["messages"], body, headers)
        self._act(self.server.answer_to(request), request)

    def _act(self, answer: Answer, request: Request) -> None:
        """Answer, or fail, as the script says."""
        match answer["kind"]:
            case "slow":
                if not self.server.stopping.wait(answer["seconds"]):
                    self._act(answer["then"], request)
            case "status":
                more = {"Retry-After": answer["retry_after"], "Location": answer["location"]}
                self._send_json(answer["code"], _error(answer["message"]), more)
            case "drip":
                self._drip(answer["seconds"], answer["headers"])
            case "broken":
                self._send(200, answer["content"].encode(), "text/html")
            case "raw":
                body = answer["body"] if isinstance(answer["body"], str) else json.dumps(answer["body"])
                self._send(200, body.encode(), more=answer["headers"])
            case "large":
                self._send(200, b" " * (answer["megabytes"] * 2**20))
            case "hang_up":
                pass
            case _:
                whole, kind = completion(answer, request.id, request.body)
                self._send(200, whole, kind)

    def _drip(self, seconds: float, headers: bool) -> None:
        """Send one byte after the other, until the client goes or the server ends."""
        piece = b"a"
        if headers:
            self.wfile.write(b"HTTP/1.0 200 OK\r\nX-Slow: ")
        else:
            piece = b" "
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
        while not self.server.stopping.wait(seconds):
            self.wfile.write(piece)

    def _send_json(self, status: int, answer: dict[str, Any], more: Mapping[str, Any] | None = None) -> None:
        self._send(status, json.dumps(answer).encode(), more=more)

    def _send(
        self, status: int, body: bytes, kind: str = "application/json", more: Mapping[str, Any] | None = None
    ) -> None:
        self.send_response(status)
        headers = {"Content-Type": kind, "Content-Length": len(body), **(more or {})}
        for name, value in headers.items():
            if value is not None:
                self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: requests are no news."""


def _error(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "scripted"}}


def main(words: list[str] | None = None) -> None:
    """Serve the script that the command line names, until Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="python -m rlreason.discovery.scripted_server", description="A model's server that answers by a script."
    )
    parser.add_argument("script", nargs="?", type=Path, metavar="SCRIPT.json", help="(a short run that ships)")
    parser.add_argument("--port", type=int, default=PORT, help=f"0: any free one ({PORT})")
    arguments = parser.parse_args(words)
    try:
        script = script_file(arguments.script) if arguments.script else read_script(DEFAULT, Path())
        server = ScriptedServer(script, arguments.port)
    except ConfigError as error:
        parser.exit(error.exit_code, f"{error}\n")
    except (OSError, OverflowError) as error:
        parser.exit(2, f"--port {arguments.port} cannot be used ({error}): give another\n")
    with stoppable(), server, suppress(KeyboardInterrupt):
        print(server.base_url, flush=True)
        server.serve_forever(poll_interval=0.2)


if __name__ == "__main__":
    main()
