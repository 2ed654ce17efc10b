"""What happened in a run, as it is kept on disk: `manifest.json` and the append-only `records.jsonl`.

One record is one JSON object on one line, told apart by its field `kind`:

    {"kind":"step","worker":0,"step":50,"epoch":1,"samples":3200,"loss":0.41,"time":1.9,...}
    {"kind":"evaluation","split":"validation","step":50,...,"value":0.93,"loss":0.22}
    {"kind":"event","event":"worker_lost","time":2.3,"step":57,"worker":1}
    {"kind":"summary",...}                                   the last line of a run that ended

JSON knows no NaN or infinity; those are written as the strings "nan", "inf" and "-inf" and read back as numbers.
Everything people look at is made from these files, so this module reads quickly: it never imports torch, and the
records that come by the million are out of the garbage collector's sight, which would visit them again and again.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.metadata
import math
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Self, cast

import msgspec
from msgspec import Meta

from torrential.config import Count
from torrential.errors import BadInput, RunFailed
from torrential.files import open_regular, read_json, read_regular

RECORDS = "records.jsonl"
MANIFEST = "manifest.json"
MANIFEST_FORMAT = 1
FAILED = "failed"  # the event that ends the records of a run that could not go on
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
LONGEST_LINE = 16 << 20  # bytes
LARGEST_AT_ONCE = 256 << 20  # bytes of records that are decoded together; larger files line by line

# What is outside of these bounds, and of Count's, did not happen in a run, and is refused when records are read.
Rank = Annotated[int, Meta(ge=0, lt=1 << 20)]
Seconds = Annotated[float, Meta(ge=-1e12, le=1e12)]


OF_NO_WORKER = range(1 << 16, 4 << 16)  # the addresses of servers, coordinators and the observer


class Step(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag_field="kind", tag="step"):
    """One worker's training since its previous Step record."""

    worker: Rank
    step: Count
    epoch: Count
    samples: Count  # over all workers, since the start of the run
    loss: float
    time: Seconds  # since the run first touched its data
    compute: Seconds  # since this worker's previous record, as are the next two
    communicate: Seconds
    wait: Seconds
    bytes_sent: Count  # by this worker, since the start of the run
    staleness: dict[Count, Count] = {}  # its updates since the start, by versions between read and push: how often
    dropped: Count = 0  # its gradients that came too late, since the start
    figures: dict[str, float] = {}  # what the task's own step gives besides the loss: means over its last samples

    @property
    def of_worker(self) -> bool:
        """Whether a worker has recorded it, or a coordinator."""
        return self.worker not in OF_NO_WORKER


class Evaluation(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag_field="kind", tag="evaluation"):
    """The metric on held-out data."""

    split: str  # "validation" or "test"
    step: Count
    epoch: Count
    samples: Count
    time: Seconds  # when these parameters existed, not when they had been evaluated
    value: float
    loss: float | None  # None: of a script that has not reported any
    figures: dict[str, float] = {}  # what the task's own step gives besides the loss: means over all samples


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="event"):
    """Something that happens rarely: worker_lost, worker_joined, regrouped, resumed, target_reached, stopped,
    algorithms_chosen, recipe, warning; failed, with the error as its detail, is the last of a run that could not go
    on."""

    event: str
    time: Seconds
    step: Count | None = None
    worker: Rank | None = None
    detail: str = ""


class Summary(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="summary"):
    """The end of a run; also the object that `--json` prints."""

    task: str
    strategy: str
    world: str
    workers: Count
    servers: Count
    seed: int
    steps: Count
    samples: Count
    seconds: Seconds
    metric: str
    value: float | None
    target: float | None
    reached: bool | None  # None without a target
    time_to_target: Seconds | None
    bytes_sent: Count
    staleness_mean: float | None  # None where no update can be stale, as in allreduce
    staleness_max: Count | None
    events: Count
    out: str
    reported: bool = False  # whether `value` is what a script has reported last; else it was measured on test data


class Work(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag_field="kind", tag="work"):
    """The counts of one batch's portions, where a coordinator deals them to workers."""

    time: Seconds
    step: Count
    seconds: Seconds  # that the batch took
    portions: Count
    copies: Count  # portions that were given to a second worker, or a third
    wasted: Count  # results thrown away: another was there first, or the worker died
    idle: dict[Rank, Seconds]  # that each worker had nothing to do


Record = Step | Evaluation | Event | Work | Summary

_decoder: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record, strict=False)  # not strict: "nan" is a float


def encode(record: Record) -> bytes:
    """One line of JSON, without the line break."""
    figures = getattr(record, "figures", {}).values()
    if not any(map(_is_odd, (*msgspec.structs.astuple(record), *figures))):
        return msgspec.json.encode(record)
    plain = cast(dict[str, Any], msgspec.to_builtins(record))
    if figures:
        plain["figures"] = {name: _in_json(value) for name, value in plain["figures"].items()}
    return msgspec.json.encode({name: _in_json(value) for name, value in plain.items()})


def _is_odd(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _in_json(value: Any) -> Any:
    return str(value) if _is_odd(value) else value


class RecordWriter:
    """Appends records to a file; each is with the operating system when `write` returns, so a killed run loses none.

    Not synced to the disk: a power cut may cost the last seconds of records, and never an earlier line.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            self._file = open(self.path, "a+b", buffering=0)  # noqa: SIM115 (closed by close)
            self._size = self._mend()
        except OSError as error:
            raise BadInput(f"cannot write {self.path} ({error.strerror}); choose another --out") from error

    def _mend(self) -> int:
        """Drops what a killed writer left of its last line, so that the next record starts a line of its own."""
        size = start = self._file.seek(0, os.SEEK_END)
        tail = b""
        while start and b"\n" not in tail:
            before = max(0, start - 65536)
            self._file.seek(before)
            tail = self._file.read(start - before) + tail
            start = before
        last = tail.rpartition(b"\n")[2]
        if not last:
            return size
        if _decode(last) is not None:
            self._file.write(b"\n")
            return size + 1
        self._file.truncate(size - len(last))
        return size - len(last)

    def write(self, record: Record) -> None:
        line = encode(record) + b"\n"
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            with contextlib.suppress(OSError):  # the readers skip a last line cut short
                self._file.truncate(self._size)
            remedy = "free some space" if error.errno in NO_SPACE else "check the disk"
            raise RunFailed(
                f"cannot append to {self.path} ({error.strerror}); {remedy}, then continue with --resume"
            ) from error
        self._size += len(line)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def note_end(directory: Path, event: str, detail: str = "") -> None:
    """Put on record what ended a run, at the time of its last record. It has no step: a resumed run keeps it."""
    path = directory / RECORDS
    with RecordWriter(path) as writer:
        when = max((record.time for record in read_records(path) if not isinstance(record, Summary)), default=0.0)
        writer.write(Event(event=event, time=when, detail=detail))


def _decode(line: bytes) -> Record | None:
    try:
        return _decoder.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _lines(path: Path) -> Iterator[tuple[bytes, Record | None]]:
    """Each line with its record; None for a last line cut short, which only the last can be."""
    broken: tuple[int, bytes] | None = None
    try:
        with open_regular(path) as file:
            for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE), b""), start=1):
                if broken is not None:
                    raise BadInput(
                        f"line {broken[0]} of {path} is no record ({broken[1][:60]!r}); "
                        "delete that line, or take the file from a copy"
                    )
                if not line.strip():
                    continue
                record = _decode(line)
                if record is None:
                    broken = (number, line)
                else:
                    yield line.rstrip(b"\n") + b"\n", record
    except OSError as error:
        raise BadInput(f"cannot read {path} ({error.strerror}); name the directory of a run") from error
    if broken is not None:
        yield broken[1], None


def scan_records(path: str | os.PathLike[str]) -> tuple[list[Record], int]:
    """All records of a file, and how many lines were cut short (0 or 1: a killed writer can only cut the last)."""
    with contextlib.suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _decoder.decode_lines(read_regular(path, LARGEST_AT_ONCE)), 0  # where that fails, lines tell why
    found = [record for _, record in _lines(Path(path))]
    records = [record for record in found if record is not None]
    return records, len(found) - len(records)


def decode_records(lines: bytes) -> tuple[list[Record], int]:
    """The records of whole lines, and how many of the lines are none."""
    with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _decoder.decode_lines(lines), 0
    found = [_decode(line) for line in lines.splitlines() if line.strip()]
    records = [record for record in found if record is not None]
    return records, len(found) - len(records)


def read_records(path: str | os.PathLike[str]) -> list[Record]:
    """All records of a file; a last line cut short is ignored, a broken line anywhere else raises BadInput."""
    return scan_records(path)[0]


def trim_records(path: str | os.PathLike[str], step: int) -> list[Record]:
    """Takes the file back to `step`, before a resumed run appends to it; gives the records that stay.

    It removes records of later steps, any summary, and a last line cut short. All other records stay, with unchanged
    bytes, records without a step included. A missing file has no records: a run may die before it writes the first.
    """
    path = Path(path)
    if not path.exists():
        return []
    kept: list[Record] = []
    lines: list[bytes] = []
    for line, record in _lines(path):
        if record is None or isinstance(record, Summary) or (record.step is not None and record.step > step):
            continue
        kept.append(record)
        lines.append(line)
    replace_file(path, b"".join(lines))
    return kept


def replace_file(path: Path, content: bytes) -> None:
    """Writes beside and renames: a reader, and a crash, meets the old content or the new and never a part."""
    beside = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        beside.unlink(missing_ok=True)
        with open(beside, "xb") as file:  # a link or pipe that somebody laid there would not be this file
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise RunFailed(f"cannot write {path} ({error.strerror}); free some space or choose another --out") from error


def lives(pid: int) -> bool:
    """Whether such a process is there and may still write; one that has ended but was not reaped may not."""
    try:
        stat = Path("/proc", str(pid), "stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The record of a run's configuration, versions and machine: enough to run it again."""

    format: int = MANIFEST_FORMAT
    torrential: str  # version
    config: dict[str, Any]
    versions: dict[str, str]
    hardware: dict[str, Any]
    seed: int
    created: str  # ISO 8601
    command: list[str]


class _Format(msgspec.Struct):
    format: int


def write_manifest(directory: str | os.PathLike[str], manifest: Manifest) -> None:
    replace_file(Path(directory) / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n")


def read_manifest(directory: str | os.PathLike[str]) -> Manifest:
    path = Path(directory) / MANIFEST
    try:
        content = read_json(path)
        found = msgspec.convert(content, _Format).format
        if found != MANIFEST_FORMAT:
            raise BadInput(
                f"{path} has format {found} and this version reads {MANIFEST_FORMAT}; use the version that wrote it"
            )
        return msgspec.convert(content, Manifest)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise BadInput(f"{directory} is no run ({MANIFEST} is missing); name the directory of a run") from error
    except OSError as error:
        raise BadInput(f"cannot read {path} ({error.strerror}); check its permissions") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} is damaged ({error}); take it from a copy, or start a new run") from error


def describe_machine() -> tuple[dict[str, str], dict[str, Any]]:
    """Versions and hardware for the manifest. GPUs come from the driver's tool: asking torch would start CUDA here."""
    versions = {"python": platform.python_version(), "platform": platform.platform()}
    for package in ("torch", "numpy"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "missing"
    hardware = {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),  # bytes
        "gpus": _gpus(),
    }
    return versions, hardware


def cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _gpus() -> list[str]:
    if not shutil.which("nvidia-smi"):
        return []
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in answer.stdout.splitlines() if line.strip()]


def make_directory(path: Path) -> None:
    """Make a directory with its parents, unless it is there."""
    with _usable(path):
        path.mkdir(parents=True, exist_ok=True)


def check_new_directory(path: Path) -> None:
    """Refuse a directory that is not empty, or cannot be written to, which is found out by writing. Only a process that
    has locked it can rely on the answer."""
    with _usable(path):
        if any(path.iterdir()):
            raise BadInput(f"{path} is not empty; choose another --out, or continue that run with --resume {path}")
        probe = path / f".writable-{os.getpid()}"
        try:
            probe.write_bytes(b"writable\n")
        finally:
            probe.unlink(missing_ok=True)


@contextlib.contextmanager
def _usable(path: Path) -> Iterator[None]:
    try:
        yield
    except (FileExistsError, NotADirectoryError) as error:
        raise BadInput(f"{path} is not a directory, or lies under a file; choose another --out") from error
    except OSError as error:
        raise BadInput(f"cannot write in {path} ({error.strerror}); choose another --out") from error


def fresh_directory(name: str) -> Path:
    """Make a new directory under runs/: of this name and the time, numbered where that is taken."""
    first = path = Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    number = 1
    with _usable(first):
        first.parent.mkdir(exist_ok=True)
        while True:
            try:
                path.mkdir()
                return path
            except FileExistsError:
                number += 1
                path = first.with_name(f"{first.name}-{number}")
