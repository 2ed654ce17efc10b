"""The registered memory of a host, as its agent keeps it and grants it to the host's roles."""

from __future__ import annotations

import math
import os
import select
import threading
from pathlib import Path

from torrential.comm import stream
from torrential.comm.admission import Admission
from torrential.worlds.local.orders import Asker, BufferRefused, BufferWanted, Granted


def available_memory() -> int:
    """Bytes that can still be used on this machine, and in this control group."""
    free = 1 << 62
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and (text := limit.read_text().strip()) != "max":
        free = min(free, int(text) - int(used.read_text()))
    return free


class Registry:
    """Anonymous memory files by key. They take memory only where they are touched. Any thread may use it."""

    def __init__(self) -> None:
        self._files: dict[str, int] = {}
        self._limit = available_memory()
        self._granted = 0
        self._lock = threading.Lock()

    def grant(self, key: str, size: int) -> Granted | BufferRefused:
        """A descriptor, or why there is none. `size` 0: only if it is there; -1: a file that is empty at first."""
        with self._lock:
            if key not in self._files:
                if not size:
                    return BufferRefused(f"nobody has registered a buffer {key!r}")
                if self._granted + size > self._limit:
                    return BufferRefused(
                        f"too little memory for shared buffers ({key!r} needs {size:,} bytes, {self._granted:,} are in "
                        f"use, {self._limit:,} were free at the start); use fewer workers or a smaller model"
                    )
                fd = os.memfd_create(f"torrential {key}", os.MFD_CLOEXEC)
                os.ftruncate(fd, max(0, size))
                self._files[key] = fd
                self._granted += max(0, size)
            return Granted(os.getpid(), self._files[key])

    def forget(self, ending: str) -> None:
        """Let go of the files whose keys end so."""
        with self._lock:
            for key in [k for k in self._files if k.endswith(ending)]:
                fd = self._files.pop(key)
                self._granted -= os.fstat(fd).st_size
                os.close(fd)

    def close(self) -> None:
        with self._lock:
            for fd in self._files.values():
                os.close(fd)
            self._files.clear()


class RegistryService:
    """Answers the roles of this host, which ask for memory over a socket; one thread is enough for all of them."""

    def __init__(self, registry: Registry, where: str, secret: bytes) -> None:
        self._registry = registry
        self._admission = Admission(where, secret, Asker)
        self.address = self._admission.address
        self._askers: dict[int, tuple[stream.Connected, stream.Plain[BufferWanted | Granted | BufferRefused]]] = {}
        self._epoll = select.epoll()
        self._epoll.register(self._admission, select.EPOLLIN)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while not self._admission.stopped:
            ready = self._epoll.poll(None if self._admission.deadline == math.inf else stream.HANDSHAKE_SECONDS)
            for sock, _ in self._admission.poll():
                self._askers[sock.fileno()] = sock, stream.Plain(sock, BufferWanted, ahead=0)
                self._epoll.register(sock, select.EPOLLIN)
            for descriptor, _ in ready:
                if descriptor in self._askers:
                    self._answer(descriptor)

    def _answer(self, descriptor: int) -> None:
        sock, connection = self._askers[descriptor]
        try:
            wanted = connection.receive()
            assert isinstance(wanted, BufferWanted)
            connection.send(self._registry.grant(wanted.key, wanted.size))
        except (stream.Closed, stream.WireError):
            del self._askers[descriptor]
            self._epoll.unregister(sock)
            stream.close(sock)

    def close(self) -> None:
        self._admission.stop()
        self._thread.join(1.0)
        for sock, _ in self._askers.values():
            stream.close(sock)
        self._epoll.close()
        self._admission.close()
