"""What every role did when, for Perfetto (ui.perfetto.dev) or chrome://tracing: trace.json in the run's directory.

A host is a process there, a role one of its threads; two more threads are the directions of its NIC. Spans: compute,
wait, handle (of what came), and transfers by kind of message.
"""

from __future__ import annotations

import json
from pathlib import Path

from torrential.comm.protocol import role_name
from torrential.records import replace_file

MOST = 2_000_000  # spans; what comes later is left out, and counted
OUT, IN = -2, -1  # threads of a NIC


class Trace:
    def __init__(self) -> None:
        self._spans: list[tuple[int, int, str, float, float]] = []  # host, thread, name, begin, end
        self._left_out = 0

    def span(self, host: int, thread: int, name: str, began: float, ended: float) -> None:
        if ended <= began:
            return
        if len(self._spans) < MOST:
            self._spans.append((host, thread, name, began, ended))
        else:
            self._left_out += 1

    def write(self, path: Path) -> None:
        threads = sorted({(host, thread) for host, thread, *_ in self._spans})
        events: list[dict[str, object]] = [
            {"ph": "M", "name": "process_name", "pid": host, "args": {"name": f"host {host}"}}
            for host in sorted({host for host, _ in threads})
        ]
        events += [
            {"ph": "M", "name": "thread_name", "pid": host, "tid": thread, "args": {"name": _name(thread)}}
            for host, thread in threads
        ]
        events += [
            {"ph": "X", "name": name, "pid": host, "tid": thread, "ts": 1e6 * began, "dur": 1e6 * (ended - began)}
            for host, thread, name, began, ended in self._spans
        ]
        whole = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"spans left out": self._left_out}}
        replace_file(path, json.dumps(whole).encode())


def _name(thread: int) -> str:
    if thread < 0:
        return "NIC out" if thread == OUT else "NIC in"
    return role_name(thread)
