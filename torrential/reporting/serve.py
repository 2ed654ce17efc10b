"""The server of the live page: on this machine's loopback only, for readers who know its address.

    http://127.0.0.1:PORT/TOKEN/            the page
    http://127.0.0.1:PORT/TOKEN/changes     what has changed: JSON

Anything else is not there. The token keeps other users of the machine out, and the check of the header Host other
sites, whose names may be made to lead here while a browser shows them (DNS rebinding). A caller has few seconds; of
many, the one that has been there longest makes room for the next.
"""

from __future__ import annotations

import contextlib
import hmac
import math
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

from torrential.errors import BadInput

if TYPE_CHECKING:
    from torrential.reporting.live import LivePage

HOST = "127.0.0.1"
MOST_CALLERS = 32
CALL_SECONDS = 30.0  # from connecting to the end of the answer
READ_SECONDS = 5.0  # for the next bytes of a request
LONGEST_QUERY = 4096  # characters
OPEN_SECONDS = 3.0  # since its last question, for which a page is taken to be open; it asks twice a second
LINGER_SECONDS = 1.3  # in which every open page asks once more
LAST_SECONDS = 5.0  # for answers that are under way
SIGNAL_SECONDS = 0.2  # after which a signal is seen that came just before a wait began, and did not interrupt it
NICE = 10  # training goes first
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def check_port(port: int) -> None:
    """Refuse a port on which this process cannot listen, or on which another one does."""
    with _named(port):
        socket.create_server((HOST, port)).close()


@contextlib.contextmanager
def _named(port: int) -> Iterator[None]:
    if not 0 <= port <= 65535:
        raise BadInput(f"there is no port {port}; give --port a number from 1 to 65535, or leave it out")
    try:
        yield
    except OSError as error:
        raise BadInput(
            f"cannot listen on port {port} ({os.strerror(error.errno or 0)}); choose another --port, or leave it out"
        ) from error


class PageServer(ThreadingHTTPServer):
    """Listens from when it is made; `serve_forever` answers callers until `shutdown` or `finish`."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = MOST_CALLERS

    def __init__(self, directory: Path, task: str | None = None, port: int = 0) -> None:
        self._directory, self._task = directory, task
        self._token = secrets.token_urlsafe(24)
        self._page: LivePage | None = None
        self._loading = threading.Lock()
        self._callers: dict[Any, float] = {}  # by connection, when it was made
        self._counting = threading.Lock()
        self._asked, self._ending = -math.inf, False
        with _named(port):
            super().__init__((HOST, port), _Handler)
        self.address = f"http://{HOST}:{self.server_port}/{self._token}/"

    def answer(self, target: str, host: str) -> tuple[HTTPStatus, str, bytes]:
        """The status, the kind of content and the content for what a browser asks for."""
        if host not in [f"{name}:{self.server_port}" for name in (HOST, "localhost")]:
            return HTTPStatus.FORBIDDEN, "text/plain", b"not an address of this server\n"
        path, _, query = target.partition("?")
        token, _, name = path.removeprefix("/").partition("/")
        known = hmac.compare_digest(token.encode(), self._token.encode())
        if known and name == "":
            return HTTPStatus.OK, "text/html", self._live().shell().encode()
        if known and name == "changes":
            self._asked = time.monotonic()
            return HTTPStatus.OK, "application/json", self._changes(query)
        return HTTPStatus.NOT_FOUND, "text/plain", b"there is no such page\n"

    def _changes(self, query: str) -> bytes:
        given = dict(parse_qsl(query[:LONGEST_QUERY]))
        version = given.get("version", "")
        number = int(version) if version.isascii() and version.isdigit() and len(version) < 16 else 0
        return self._live().changes(given.get("view", ""), given.get("shown", ""), number, last=self._ending)

    def _live(self) -> LivePage:
        """The page, which is loaded when somebody first asks for it: until then the server costs next to nothing."""
        with self._loading:
            if self._page is None:
                from torrential.reporting.live import LivePage

                self._page = LivePage(self._directory, self._task)
            return self._page

    def finish(self) -> None:
        """Give pages that are open the time to get the last state, then end `serve_forever` in another thread."""
        self._ending = True
        if time.monotonic() - self._asked < OPEN_SECONDS:
            time.sleep(LINGER_SECONDS)
        late = time.monotonic() + LAST_SECONDS
        while self._callers and time.monotonic() < late:
            time.sleep(0.02)
        self.shutdown()

    def server_bind(self) -> None:
        """Do not look up the name of this machine, which may take long where it is unknown."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = HOST, int(self.server_address[1])

    # -- callers --------------------------------------------------------------------------------------------------
    def process_request(self, request: Any, client_address: Any) -> None:
        with self._counting:
            if len(self._callers) >= MOST_CALLERS:
                self._drop(min(self._callers, key=lambda caller: self._callers[caller]))
            self._callers[request] = time.monotonic()
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Called a few times a second."""
        with self._counting:
            late = time.monotonic() - CALL_SECONDS
            for caller in [caller for caller, came in self._callers.items() if came < late]:
                self._drop(caller)

    def _drop(self, caller: socket.socket) -> None:
        """Have its thread end: it finds the connection closed."""
        del self._callers[caller]
        with contextlib.suppress(OSError):  # it may have closed it itself
            caller.shutdown(socket.SHUT_RDWR)

    def shutdown_request(self, request: Any) -> None:
        with self._counting:
            self._callers.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exception()
        if not isinstance(error, OSError) or error.filename is not None:  # else a caller has left, or was dropped
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    """One request on a connection of its own."""

    timeout = READ_SECONDS
    server: PageServer

    def do_GET(self) -> None:
        status, kind, content = self.server.answer(self.path, self.headers.get("Host", ""))
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def version_string(self) -> str:
        return "torrential"

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the terminal belongs to the run."""


def watch(directory: Path, task: str | None, port: int, say: Callable[[str], None]) -> None:
    """Serve the page of a directory until Ctrl-C; `say` is told its address."""
    if not directory.is_dir():
        raise BadInput(f"there is no directory {directory}; name a study, a directory of runs, or a run")
    os.nice(NICE)
    with PageServer(directory, task, port) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)  # no signal interrupts an answer there
        thread.start()
        try:
            say(server.address)
            while thread.is_alive():  # until Ctrl-C, or another signal that raises
                thread.join(SIGNAL_SECONDS)
        except KeyboardInterrupt:
            pass
        finally:
            server.shutdown()
            thread.join()
