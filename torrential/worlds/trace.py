"""What every role did when, for Perfetto (ui.perfetto.dev) or chrome://tracing: trace.json in the run's directory.

A host is a process there, a role one of its threads; of a simulated host, two more threads are the directions of its
NIC. Spans: compute, wait, handle (of what came), and transfers by kind of message; of pipelines what a worker does with
each microbatch (stages/passes.py), with `microbatch`, `chunk` and the seconds that it `waited` among its arguments.

In a simulation all spans are kept in memory. Real workers append theirs to files of their own, so that those of one
that is killed are not lost; at the end of the run they become one.
"""

from __future__ import annotations

import json
import resource
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torrential.comm.protocol import role_name
from torrential.records import replace_file

TRACE = "trace.json"
MOST = 2_000_000  # spans; what comes later is left out, and counted
OUT, IN = -2, -1  # threads of a NIC
NOTHING: Mapping[str, float] = {}


class Trace:
    """The spans of a simulation."""

    def __init__(self) -> None:
        self._spans: list[tuple[int, int, str, float, float, Mapping[str, float]]] = []  # ..., begin, end, about
        self._left_out = 0

    def span(
        self, host: int, thread: int, name: str, began: float, ended: float, about: Mapping[str, float] = NOTHING
    ) -> None:
        if ended <= began:
            return
        if len(self._spans) < MOST:
            self._spans.append((host, thread, name, began, ended, about))
        else:
            self._left_out += 1

    def write(self, path: Path) -> None:
        _write(path, [_event(*span) for span in self._spans], self._left_out)


class WorkerTrace:
    """The spans of one real worker, in a file of its own."""

    def __init__(self, directory: Path, address: int, life: int, now: Callable[[], float]) -> None:
        self._file = open(_part(directory, address, life), "w", encoding="utf-8")  # noqa: SIM115 (closed by close)
        self._address, self._now, self._spans = address, now, 0

    def span(self, name: str, began: float, ended: float, about: Mapping[str, float] = NOTHING) -> None:
        self._spans += 1
        if self._spans <= MOST:
            self._file.write(json.dumps(_event(0, self._address, name, began, ended, about)) + "\n")

    def close(self) -> None:
        """Note how much memory this process takes, and finish."""
        megabytes = {name: size / 1e6 for name, size in memory().items()}
        event = {"ph": "C", "name": f"memory of {role_name(self._address)}, MB", "pid": 0, "tid": self._address}
        self._file.write(json.dumps(event | {"ts": 1e6 * self._now(), "args": megabytes}) + "\n")
        self._file.close()


def memory() -> dict[str, int]:
    """The bytes of memory that this process takes now, what it shares with others counted in parts (pss); and at its
    peak: as much more as its resident memory was larger then."""
    sizes = dict[str, int]()
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]:
        name, size, *_ = line.split()
        sizes[name.rstrip(":").lower()] = 1024 * int(size)
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"pss": sizes["pss"], "peak": sizes["pss"] + max(0, peak - sizes["rss"])}


def clear_parts(directory: Path) -> None:
    """Remove what the workers of an earlier run in this directory have left, if it was killed."""
    for path in _parts(directory):
        path.unlink()


def join_parts(directory: Path) -> None:
    """Make one file of those of all workers."""
    events, left_out = list[Any](), 0
    for path in _parts(directory):
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                events.append(json.loads(line))
            except json.JSONDecodeError:
                left_out += 1  # the last line of a worker that was killed
    _write(directory / TRACE, events, left_out)
    clear_parts(directory)


def _part(directory: Path, address: int, life: int) -> Path:
    return directory / f".trace-{address}-{life}.jsonl"


def _parts(directory: Path) -> list[Path]:
    return sorted(directory.glob(".trace-*.jsonl"))


def _event(host: int, thread: int, name: str, began: float, ended: float, about: Mapping[str, float]) -> dict[str, Any]:
    event = {"ph": "X", "name": name, "pid": host, "tid": thread, "ts": 1e6 * began, "dur": 1e6 * (ended - began)}
    return event | ({"args": dict(about)} if about else {})


def _write(path: Path, events: Iterable[dict[str, Any]], left_out: int) -> None:
    events = list(events)
    threads = sorted({(event["pid"], event["tid"]) for event in events})
    named: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": host, "args": {"name": f"host {host}"}}
        for host in sorted({host for host, _ in threads})
    ]
    named += [
        {"ph": "M", "name": "thread_name", "pid": host, "tid": thread, "args": {"name": _name(thread)}}
        for host, thread in threads
    ]
    whole = {"traceEvents": named + events, "displayTimeUnit": "ms", "otherData": {"spans left out": left_out}}
    replace_file(path, json.dumps(whole).encode())


def _name(thread: int) -> str:
    if thread < 0:
        return "NIC out" if thread == OUT else "NIC in"
    return role_name(thread)
