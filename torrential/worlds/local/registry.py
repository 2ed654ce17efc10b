"""The supervisor's side of registered buffers."""

from __future__ import annotations

import os
from pathlib import Path


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
    """Anonymous memory files by key. They take memory only where they are touched."""

    def __init__(self) -> None:
        self._files: dict[str, int] = {}
        self._limit = available_memory()
        self._granted = 0

    def grant(self, key: str, size: int) -> int | str:
        """A descriptor, or why there is none. `size` 0: only if it is there; -1: a file that is empty at first."""
        if key not in self._files:
            if not size:
                return f"nobody has registered a buffer {key!r}"
            if self._granted + size > self._limit:
                return (
                    f"too little memory for shared buffers ({key!r} needs {size:,} bytes, {self._granted:,} are in "
                    f"use, {self._limit:,} were free at the start); use fewer workers or a smaller model"
                )
            fd = os.memfd_create(f"torrential {key}", os.MFD_CLOEXEC)
            os.ftruncate(fd, max(0, size))
            self._files[key] = fd
            self._granted += max(0, size)
        return self._files[key]

    def path(self, key: str) -> str:
        """The path of a file that processes of this user, and no other, can open; it is empty at first and may grow."""
        if key not in self._files:
            self._files[key] = os.memfd_create(f"torrential {key}", os.MFD_CLOEXEC)
        return f"/proc/{os.getpid()}/fd/{self._files[key]}"

    def forget(self, ending: str) -> None:
        """Let go of the files whose keys end so."""
        for key in [k for k in self._files if k.endswith(ending)]:
            fd = self._files.pop(key)
            self._granted -= os.fstat(fd).st_size
            os.close(fd)

    def close(self) -> None:
        for fd in self._files.values():
            os.close(fd)
        self._files.clear()
