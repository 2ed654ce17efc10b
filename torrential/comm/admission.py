"""Who may connect: a caller shows the run's token and says who it is, and costs next to nothing until it has.

    caller ── token, greeting ──► listener     anything else: a stranger, dropped and counted

Every listener of a run has an `Admission`. No thread waits for a stranger, and none can stay by saying a byte now and
then: all of it must have come so many seconds after connecting. Of those who have not shown the token only so many are
kept; the one that connected first makes room for the next. One who has the token says it at once, and stays.
"""

from __future__ import annotations

import contextlib
import hmac
import math
import select
import socket
import time
from typing import Any, Generic, TypeVar

import msgspec

from torrential.comm import wire

MOST_STRANGERS = 64  # who have connected and not shown the token yet
MAX_GREETING = 1 << 12  # bytes
OUT_OF_DESCRIPTORS_SECONDS = 0.01

M = TypeVar("M")


class _Opening(msgspec.Struct, Generic[M], array_like=True, frozen=True):
    """The header of a greeting's frame, as of any other; no tensors follow it."""

    greeting: M
    tensors: list[Any]


class _Caller:
    """A connection that has not been admitted yet."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock, self.deadline = sock, time.monotonic() + wire.HANDSHAKE_SECONDS
        self.showed_token = False
        self._said = bytearray()
        self._wanted = wire.TOKEN_BYTES  # of what is asked for in all, as far as that is known

    def hear(self, token: bytes) -> bytearray | None:
        """Read what has come; the greeting's header once it is there. Nothing behind it is read."""
        while len(self._said) < self._wanted:
            try:
                more = self.sock.recv(self._wanted - len(self._said), socket.MSG_DONTWAIT)
            except BlockingIOError:
                return None
            if not more:
                raise wire.WireError("no greeting")
            self._said += more
            if len(self._said) == wire.TOKEN_BYTES:
                if not hmac.compare_digest(self._said, token):
                    raise wire.WireError("wrong token")
                self.showed_token = True
                self._wanted += wire.LENGTH.size
            elif len(self._said) == wire.TOKEN_BYTES + wire.LENGTH.size:
                (length,) = wire.LENGTH.unpack_from(self._said, wire.TOKEN_BYTES)
                if not 0 < length <= MAX_GREETING:
                    raise wire.WireError(f"greeting of {length} bytes (limit: {MAX_GREETING})")
                self._wanted += length
        return self._said[wire.TOKEN_BYTES + wire.LENGTH.size :]


class Admission:
    """A listening socket and its callers. To be used by one thread, except for `stop`.

    `fileno` is of an epoll: another one can watch it.
    """

    def __init__(self, address: str, token: bytes, greeting: Any) -> None:
        self._listener, self.address = wire.listen(address)
        self._listener.setblocking(False)
        self._token = token
        self._decoder = wire.decoder_of(_Opening[greeting])
        self._callers: dict[int, _Caller] = {}  # by descriptor, in the order of their coming
        self._admitted: list[tuple[socket.socket, Any]] = []
        self.strangers = 0  # that were dropped
        self.stopped = False
        self._epoll = select.epoll()
        self._epoll.register(self._listener, select.EPOLLIN)

    def fileno(self) -> int:
        return self._epoll.fileno()

    @property
    def deadline(self) -> float:
        """The time by which the first caller must have said who it is."""
        return next((caller.deadline for caller in self._callers.values()), math.inf)

    def poll(self, seconds: float = 0.0) -> list[tuple[socket.socket, Any]]:
        """The callers that were admitted within so many seconds at most, with their greetings."""
        patience = min(seconds, self.deadline - time.monotonic())
        for descriptor, _ in self._epoll.poll(None if patience == math.inf else max(0.0, patience)):
            if (caller := self._callers.get(descriptor)) is not None:
                self._hear(caller)
            elif descriptor == self._listener.fileno() and not self.stopped:
                self._accept()
        now = time.monotonic()
        while self.deadline <= now:  # after reading: this process itself may have looked elsewhere for long
            self._drop(next(iter(self._callers.values())))
        admitted, self._admitted = self._admitted, []
        return admitted

    def stop(self) -> None:
        """Admit nobody from now on, and wake whoever is in `poll`."""
        self.stopped = True
        with contextlib.suppress(OSError):  # it is not connected to anybody
            self._listener.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.stopped = True
        for caller in list(self._callers.values()):
            self._forget(caller)
            caller.sock.close()
        self._epoll.close()
        self._listener.close()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return  # it has gone again
        except OSError:  # out of descriptors, which strangers may have taken
            if not self._make_room():
                time.sleep(OUT_OF_DESCRIPTORS_SECONDS)
            return
        caller = self._callers[sock.fileno()] = _Caller(sock)
        self._epoll.register(sock, select.EPOLLIN)
        try:
            wire.check_user(sock)
            wire.tune(sock)
        except (wire.WireError, OSError):
            return self._drop(caller)
        self._hear(caller)
        if sum(not other.showed_token for other in self._callers.values()) > MOST_STRANGERS:
            self._make_room()

    def _make_room(self) -> bool:
        """Drop the one that has been silent for longest, unless it speaks now; whether there was one."""
        first = next((caller for caller in self._callers.values() if not caller.showed_token), None)
        if first is None:
            return False
        self._hear(first)
        if first.sock.fileno() in self._callers and not first.showed_token:
            self._drop(first)
        return True

    def _hear(self, caller: _Caller) -> None:
        try:
            header = caller.hear(self._token)
            if header is None:
                return
            opening = self._decoder.decode(header)
            if opening.tensors:
                raise wire.WireError("a greeting with tensors")
        except Exception:  # of bytes, types or sizes: there are many ways not to make sense
            return self._drop(caller)
        self._forget(caller)
        self._admitted.append((caller.sock, opening.greeting))

    def _drop(self, caller: _Caller) -> None:
        self.strangers += 1
        self._forget(caller)
        wire.close(caller.sock)

    def _forget(self, caller: _Caller) -> None:
        del self._callers[caller.sock.fileno()]
        self._epoll.unregister(caller.sock)
