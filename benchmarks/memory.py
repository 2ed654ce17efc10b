"""How much memory a tree of processes takes, each shared page counted once (PSS)."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Self

EVERY_SECONDS = 0.2


class MemoryWatch:
    """Samples the trees that start at `roots` while the block runs; with no roots it does nothing."""

    def __init__(self, roots: list[int]) -> None:
        self._roots = roots
        self._samples: list[tuple[float, int]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._over.wait(EVERY_SECONDS):
            now = time.monotonic()
            self._samples.append((now, sum(pss(pid) for root in self._roots for pid in tree(root))))

    def typical(self, start: float, end: float) -> int | None:
        """The median in bytes; None if no sample fell between the two times, or this system does not tell."""
        sizes = [size for at, size in self._samples if start <= at <= end and size]
        return int(median(sizes)) if sizes else None

    def highest(self) -> int | None:
        return max((size for _, size in self._samples), default=0) or None

    def __enter__(self) -> Self:
        if self._roots:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        if self._roots:
            self._thread.join()


def tree(pid: int) -> list[int]:
    """`pid` and all its descendants."""
    found = [pid]
    for parent in found:
        try:
            lists = [task / "children" for task in Path(f"/proc/{parent}/task").iterdir()]
            found += [int(child) for each in lists for child in each.read_text().split()]
        except OSError:
            continue  # it has ended
    return found


def pss(pid: int, kind: str = "Pss") -> int:
    """Bytes; also of `Pss_Anon`, which is its own, or `Pss_Shmem`."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith(f"{kind}:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # it has ended
    return 0


def by_role(root: int) -> dict[str, tuple[int, int]]:
    """What torrential's processes below `root` take, by name: memory of their own, and shared memory."""
    found = {}
    for pid in tree(root):
        name = Path(f"/proc/{pid}/comm").read_text().strip()
        if name.startswith("tt-"):
            found[name] = pss(pid, "Pss_Anon"), pss(pid, "Pss_Shmem")
    return found
