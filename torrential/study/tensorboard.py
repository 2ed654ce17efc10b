"""The runs of a study as TensorBoard reads them, written without TensorBoard: one event file for each run.

    length, checksum of it, an Event, checksum of that                       a record; numbers are little-endian
    Event: 1 wall time, 2 step, 3 version (in the first) or 5 { 1 { 1 tag, 2 value } }       as protobuf has it

TensorBoard's steps are samples here, which mean the same in all strategies; its relative time is that of the records.
"""

from __future__ import annotations

import functools
import math
import shutil
import struct
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from torrential.records import Evaluation, Step, replace_file
from torrential.study.results import Run, Study

DIRECTORY = "tensorboard"
VERSION = b"brain.Event:2"
LARGEST_FLOAT = 3.4e38  # of four bytes


def write_events(study: Study) -> Path:
    """Into a directory of their own, which is made anew."""
    place = study.directory / DIRECTORY
    shutil.rmtree(place, ignore_errors=True)
    for kind, entries in (("", study.entries), ("tuning-", study.tuning)):
        for run in (run for entry in entries for run in entry.runs):
            file = place / f"{kind}{run.directory.name}" / "events.out.tfevents.0.torrential"
            file.parent.mkdir(parents=True, exist_ok=True)
            replace_file(file, event_file(run, study.metric))
    return place


def event_file(run: Run, metric: str) -> bytes:
    start = _seconds_of(run.manifest.created)
    events = [_double(1, start) + _bytes(3, VERSION)]
    for tag, samples, time, value in _points(run, metric):
        summary = _bytes(1, _bytes(1, tag.encode()) + _float(2, value))
        events.append(_double(1, start + time) + _int(2, samples) + _bytes(5, summary))
    return b"".join(_record(event) for event in events)


def _seconds_of(date: str) -> float:
    """Since 1970; 0 for a text that is no date: what TensorBoard shows is mostly the time since the first event."""
    try:
        return datetime.fromisoformat(date).timestamp()
    except (ValueError, OverflowError):
        return 0.0


def _points(run: Run, metric: str) -> Iterator[tuple[str, int, float, float]]:
    """Tag, samples, seconds and value, by time."""
    records: list[Step | Evaluation] = sorted([*run.steps, *run.evaluations], key=lambda record: record.time)
    for record in records:
        if isinstance(record, Evaluation):
            yield f"{record.split}/{metric}", record.samples, record.time, record.value
            yield f"{record.split}/loss", record.samples, record.time, record.loss
        else:
            yield f"train/loss of worker {record.worker}", record.samples, record.time, record.loss


# -- protobuf ---------------------------------------------------------------------------------------------------------
def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


def _int(field: int, value: int) -> bytes:
    return bytes([field << 3]) + _varint(value)


def _double(field: int, value: float) -> bytes:
    return struct.pack("<Bd", field << 3 | 1, value)


def _bytes(field: int, value: bytes) -> bytes:
    return bytes([field << 3 | 2]) + _varint(len(value)) + value


def _float(field: int, value: float) -> bytes:
    return struct.pack("<Bf", field << 3 | 5, math.copysign(math.inf, value) if abs(value) > LARGEST_FLOAT else value)


# -- records ----------------------------------------------------------------------------------------------------------
def _record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + _checksum(length) + data + _checksum(data)


def _checksum(data: bytes) -> bytes:
    """CRC-32C, rotated and moved, as the format wants it."""
    table, crc = _table(), 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 255] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


@functools.cache
def _table() -> list[int]:
    found = []
    for crc in range(256):
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
        found.append(crc)
    return found
