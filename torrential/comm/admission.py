"""Who may connect: a caller proves that it knows the run's secret (comm/handshake.py) and says who it is, and costs
next to nothing until it has. Over tcp that may be within TLS (comm/tls.py): then it shows a certificate first.

    caller ── number, proof, greeting ──► listener     anything else: a stranger, dropped and counted
    caller ◄── answer ─────────────────── listener

Every listener of a run has an `Admission`. No thread waits for a stranger, and none can stay by saying a byte now and
then: all of it must have come so many seconds after connecting. Of those who have not said it all only so many are
kept; the one that connected first makes room for the next. A caller of this run says it at once.
"""

from __future__ import annotations

import contextlib
import math
import select
import socket
import time
from typing import Any

from torrential.comm import stream
from torrential.comm.handshake import CLEAR, ENCIPHERED, HEAD_BYTES, LENGTH, MAX_GREETING, Challenge
from torrential.comm.tls import Tls

MOST_STRANGERS = 64  # who have connected and not said all of it yet
OUT_OF_DESCRIPTORS_SECONDS = 0.01


class _Caller:
    """A connection that has not been admitted yet."""

    def __init__(self, sock: stream.Connected) -> None:
        self.sock, self.deadline = sock, time.monotonic() + stream.HANDSHAKE_SECONDS
        self._said = bytearray()
        self._wanted = HEAD_BYTES  # of what is asked for in all, as far as that is known

    def hear(self) -> tuple[bytes, bytes] | None:
        """Read what has come; the head and the greeting once they are there. Nothing behind them is read."""
        while len(self._said) < self._wanted:
            try:
                more = self.sock.recv(self._wanted - len(self._said), socket.MSG_DONTWAIT)
            except BlockingIOError:
                return None
            if not more:
                raise stream.WireError("no greeting")
            self._said += more
            if len(self._said) == HEAD_BYTES:
                (length,) = LENGTH.unpack_from(self._said, HEAD_BYTES - LENGTH.size)
                if not 0 < length <= MAX_GREETING:
                    raise stream.WireError(f"greeting of {length} bytes (limit: {MAX_GREETING})")
                self._wanted += length
        return bytes(self._said[:HEAD_BYTES]), bytes(self._said[HEAD_BYTES:])


class Admission:
    """A listening socket and its callers. To be used by one thread, except for `stop`.

    `fileno` is of an epoll: another one can watch it.
    """

    def __init__(
        self, address: str, secret: bytes, greeting: Any, tls: Tls | None = None, says_challenge: bool = False
    ) -> None:
        """`says_challenge`: callers know the address alone, and are told the challenge when they have connected; `tls`
        is for anybody then, and proofs name its certificate."""
        self._tls, self._says_challenge = tls, says_challenge
        self._challenge = Challenge(secret, tls.digest if says_challenge and tls is not None else b"")
        self._listener, where = stream.listen(address)
        self.address = stream.challenging(where, self._challenge.words)
        self._listener.setblocking(False)
        self._decoder = stream.decoder_of(greeting)
        self._callers: dict[int, _Caller] = {}  # by descriptor, in the order of their coming
        self._admitted: list[tuple[stream.Connected, Any]] = []
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

    def poll(self, seconds: float = 0.0) -> list[tuple[stream.Connected, Any]]:
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
        """Admit no more callers, and wake the thread that is in `poll`."""
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
        tls = None if sock.family == socket.AF_UNIX else self._tls
        caller = self._callers[sock.fileno()] = _Caller(sock if tls is None else tls.answer(sock))
        self._epoll.register(sock, select.EPOLLIN)
        try:
            stream.check_user(sock)
            if self._says_challenge:
                how = CLEAR if tls is None else ENCIPHERED
                sock.sendall(how + self._challenge.words)  # the first that is written there, so it does not block
            if sock.family != socket.AF_UNIX:
                stream.tune(sock, sock.getpeername()[0])
        except (stream.WireError, OSError):
            return self._drop(caller)
        self._hear(caller)
        if len(self._callers) > MOST_STRANGERS:
            self._make_room()

    def _make_room(self) -> bool:
        """Drop the one that has been silent for longest, unless it speaks now; whether there was one."""
        first = next(iter(self._callers.values()), None)
        if first is None:
            return False
        self._hear(first)
        if first.sock.fileno() in self._callers:
            self._drop(first)
        return True

    def _hear(self, caller: _Caller) -> None:
        try:
            said = caller.hear()
            if said is None:
                return
            answer = self._challenge.answer(*said)
            if answer is None:
                raise stream.WireError("wrong proof")
            greeting = self._decoder.decode(said[1])
        except Exception:  # of bytes, types or sizes: there are many ways not to make sense
            return self._drop(caller)
        self._forget(caller)
        with contextlib.suppress(OSError):  # it has gone again; what it said before is read all the same
            caller.sock.sendall(answer)  # the first that is written there, so it does not block
        self._admitted.append((caller.sock, greeting))

    def _drop(self, caller: _Caller) -> None:
        self.strangers += 1
        self._forget(caller)
        stream.close(caller.sock)

    def _forget(self, caller: _Caller) -> None:
        del self._callers[caller.sock.fileno()]
        self._epoll.unregister(caller.sock)
