"""Records all that crosses the loopback interface or another network over TCP, by connection. Only root can."""

from __future__ import annotations

import base64
import ctypes
import os
import secrets
import socket
import struct
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Self

from benchmarks.link import CLONE_NEWNET

ALL_PROTOCOLS = 3
IPV4 = 0x0800
SOL_PACKET, PACKET_STATISTICS = 263, 6
LINK_BYTES = 14  # of the header before that of IP
LARGEST_PACKET = 1 << 17
SO_RCVBUFFORCE = 33
ROOM = 1 << 28  # bytes that wait to be recorded
LOOK_SECONDS = 0.1
DISCARD_PORT = 9


class Direction(NamedTuple):
    """The ports of what was sent one way on a connection, and the addresses."""

    source: int
    to: int
    addresses: bytes


class Wiretap:
    def __init__(self, network: int | None = None) -> None:
        """`network`: the pid of a process; what comes in at any interface of its network is recorded, of which nothing
        may be left when the recording stops."""
        self.said: dict[Direction, bytearray] = defaultdict(bytearray)
        self._network = network
        if network is None:
            self._sock = _listening()
            self._sock.bind(("lo", 0))
        else:
            with ThreadPoolExecutor(1) as pool:  # a socket stays in the network in which its thread has made it
                self._sock = pool.submit(_listening_in, network).result()
        self._sock.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, ROOM)
        self._sock.settimeout(LOOK_SECONDS)
        self._ended, self._last_words = threading.Event(), secrets.token_bytes(16)
        self._thread = threading.Thread(target=self._record, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Record no more. To be called once, or at the end of the context."""
        if self._ended.is_set():
            return
        self._ended.set()
        if self._network is None:
            self._mark()
        self._thread.join(60)
        _, lost = struct.unpack("II", self._sock.getsockopt(SOL_PACKET, PACKET_STATISTICS, 8))
        self._sock.close()
        assert not self._thread.is_alive() and not lost, f"{lost} packets were not recorded"

    def _mark(self) -> None:
        """Let the recording end here."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as marking:
            marking.sendto(self._last_words, ("127.0.0.1", DISCARD_PORT))  # others may never be silent

    def holds(self, words: bytes) -> bool:
        return any(words in said for said in list(self.said.values()))

    def _record(self) -> None:
        while True:
            try:
                packet, (_, protocol, kind, *_) = self._sock.recvfrom(LARGEST_PACKET)
            except TimeoutError:
                if self._ended.is_set():
                    return
                continue
            if self._last_words in packet:
                return
            if protocol == IPV4 and kind != socket.PACKET_OUTGOING:  # each is seen twice
                self._take(packet[LINK_BYTES:])

    def _take(self, packet: bytes) -> None:
        head, (length,) = 4 * (packet[0] & 15), struct.unpack_from(">H", packet, 2)
        if packet[9] == socket.IPPROTO_TCP:
            source, to = struct.unpack_from(">HH", packet, head)
            contents = head + 4 * (packet[head + 12] >> 4)
            self.said[Direction(source, to, packet[12:20])] += packet[contents : length or len(packet)]


def _listening() -> socket.socket:
    return socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ALL_PROTOCOLS))


def _listening_in(network: int) -> socket.socket:
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/proc/{network}/ns/net") as there:
        if libc.setns(there.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return _listening()


def forms(secret: bytes) -> list[bytes]:
    """A secret as it might be found in a recording."""
    return [secret, secret[:8], secret.hex().encode(), secret.hex().upper().encode(), base64.b64encode(secret)[:-1]]
