"""How the hosts of a run find one another: the agents of others call the supervisor's at an address that all know.

    agent ── connects ──────────────► supervisor
    agent ◄── TLS or not, challenge ─ supervisor     anybody may read it
    agent ── number, proof, Come ───► supervisor     as at any listener (comm/handshake.py); from here on in TLS, with
    agent ◄── answer ──────────────── supervisor     security=tls: the proofs name the supervisor's certificate

What all hosts know besides, a secret from a file or the environment, never travels. That of a run is made of it and of
a salt that the supervisor draws, so what was said in one run is of no use in another.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import ssl
import time
from pathlib import Path
from typing import NamedTuple

from torrential.comm import stream
from torrential.comm.handshake import CHALLENGE_BYTES, CLEAR, ENCIPHERED
from torrential.comm.tls import call_unknown
from torrential.errors import BadInput, RunFailed
from torrential.worlds.hosts.messages import Come

SECRET_VARIABLE = "TORRENTIAL_SECRET"
LEAST_SECRET = 16  # characters
JOIN_SECONDS = 600.0  # until the supervisor listens: its host loads the task before
ATTEMPT_SECONDS = 5.0
AGAIN_SECONDS = 0.25


class Rendezvous(NamedTuple):
    """Where hosts meet, and which of them this one is."""

    address: str  # of the supervisor's host, as in tcp:10.0.0.1:29500
    host: int
    hosts: int
    secret: bytes  # that all hosts know

    @property
    def interface(self) -> str:
        """The address of the supervisor's host, without the port."""
        return str(stream.parse(self.address)[1][0])


def rendezvous(where: str, host: int | None, hosts: int | None, secret_file: Path | None) -> Rendezvous:
    """What the options of the command say. The secret comes from a file or from the environment."""
    name, colon, port = where.rpartition(":")
    if not colon or not name or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise BadInput(f"--rendezvous takes HOST:PORT (given: {where!r})")
    if host is None or hosts is None:
        missing = "--host-rank" if host is None else "--hosts"
        raise BadInput(f"--rendezvous needs {missing} as well: the number of this host from 0 on, and of all hosts")
    if hosts < 1 or host < 0:
        raise BadInput(f"--host-rank counts from 0 and --hosts from 1 (given: {host} of {hosts})")
    try:
        *_, place = socket.getaddrinfo(name.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise BadInput(f"--rendezvous: {name!r} is no address that this host knows ({error.strerror})") from error
    return Rendezvous(stream.tcp_address(str(place[0]), int(port)), host, hosts, _secret(secret_file))


def _secret(file: Path | None) -> bytes:
    if file is None:
        text, source = os.environ.get(SECRET_VARIABLE, ""), SECRET_VARIABLE
    else:
        try:
            text, source = file.read_text(), str(file)
        except (OSError, UnicodeDecodeError) as error:
            raise BadInput(f"--secret-file {file} cannot be read ({error})") from error
    text = text.strip()
    if not text:
        raise BadInput(
            f"hosts need a secret that all of them know: give --secret-file FILE, or {SECRET_VARIABLE} in the "
            "environment (openssl rand -hex 32 makes one)"
        )
    if len(text) < LEAST_SECRET:
        raise BadInput(f"the secret in {source} is too short ({len(text)} characters, at least {LEAST_SECRET})")
    return hashlib.sha256(text.encode()).digest()


def secret_of_run(secret: bytes, salt: bytes) -> bytes:
    return hmac.digest(secret, b"run" + salt, "sha256")


def join(meeting: Rendezvous, come: Come, seconds: float = JOIN_SECONDS) -> stream.Connected:
    """The connection of an agent to the supervisor, which has proved to know the secret, once it is there."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return _call(meeting, come)
        except (stream.WireError, ssl.SSLError) as error:
            raise BadInput(
                f"host 0 at {meeting.address.removeprefix('tcp:')} knows another secret, or is no supervisor; give all "
                "hosts the same"
            ) from error
        except OSError as error:
            if time.monotonic() > deadline:
                raise RunFailed(
                    f"host 0 was not at {meeting.address.removeprefix('tcp:')} within {seconds:.0f} s ({error}); start "
                    "the command there with --host-rank 0, and see that this host reaches it"
                ) from error
            time.sleep(AGAIN_SECONDS)


def _call(meeting: Rendezvous, come: Come) -> stream.Connected:
    sock: stream.Connected = stream.connect(meeting.address, ATTEMPT_SECONDS)
    try:
        sock.settimeout(ATTEMPT_SECONDS)
        how, challenge = _hear(sock, len(CLEAR)), _hear(sock, CHALLENGE_BYTES)
        if how == ENCIPHERED:
            assert isinstance(sock, socket.socket)
            sock = call_unknown(sock)
            sock.shake_hands(ATTEMPT_SECONDS)
            challenge += sock.digest()
        elif how != CLEAR:
            raise stream.WireError("no supervisor")
        stream.prove(sock, stream.challenging(meeting.address, challenge), meeting.secret, come)
        sock.settimeout(None)
    except (OSError, stream.WireError):
        sock.close()
        raise
    return sock


def _hear(sock: stream.Connected, count: int) -> bytes:
    said = b""
    while len(said) < count:
        more = sock.recv(count - len(said))
        if not more:
            raise ConnectionError("it hung up")
        said += more
    return said
