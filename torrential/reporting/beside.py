"""The live page beside a run: served by a helper process, so that training shares nothing with it.

command ── directory, port ──► helper        the server listens, and answers with its address or what is wrong
        ◄── address ──────────
        ── (closed) ─────────►               pages get the last state; the helper ends
"""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from torrential.errors import BadInput, RunFailed
from torrential.processes import start_helper
from torrential.reporting.serve import NICE, PageServer

START_SECONDS = 60.0
END_SECONDS = 10.0
LONGEST_MESSAGE = 1 << 16


class _Order(msgspec.Struct):
    directory: str
    port: int


class _Answer(msgspec.Struct):
    address: str = ""
    problem: str = ""


@contextmanager
def page_beside(directory: Path, port: int) -> Iterator[str]:
    """Serve the live page of a run from another process, until the block ends; gives its address."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        with theirs:
            helper = start_helper("torrential.reporting.beside", [theirs.fileno()])
        try:
            yield _address(ours, _Order(str(directory), port))
        finally:
            ours.close()
            try:
                helper.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                helper.kill()
                helper.wait()


def _address(helper: socket.socket, order: _Order) -> str:
    helper.settimeout(START_SECONDS)
    try:
        helper.send(msgspec.json.encode(order))
        answer = msgspec.json.decode(helper.recv(LONGEST_MESSAGE), type=_Answer)
    except (OSError, msgspec.DecodeError) as error:
        raise RunFailed(f"the server of the live page did not start ({error}); leave out --watch") from error
    if answer.problem:
        raise BadInput(answer.problem)
    return answer.address


def main(descriptor: int) -> None:
    """The helper."""
    with socket.socket(fileno=descriptor) as command:
        order = msgspec.json.decode(command.recv(LONGEST_MESSAGE), type=_Order)
        os.nice(NICE)
        try:
            server = PageServer(Path(order.directory), port=order.port)
        except BadInput as error:
            command.send(msgspec.json.encode(_Answer(problem=str(error))))
            return
        with server:
            command.send(msgspec.json.encode(_Answer(address=server.address)))
            threading.Thread(target=_finish_with, args=(command, server), daemon=True).start()
            server.serve_forever()


def _finish_with(command: socket.socket, server: PageServer) -> None:
    command.recv(1)  # nothing comes; it returns when the command has closed its end
    server.finish()
