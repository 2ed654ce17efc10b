"""Records survive kills, full disks and odd numbers; run directories and manifests refuse what cannot work."""

from __future__ import annotations

import errno
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from torrential.errors import BadInput, RunFailed
from torrential.records import (
    Evaluation,
    Event,
    Manifest,
    Record,
    RecordWriter,
    Step,
    Summary,
    check_new_directory,
    describe_machine,
    encode,
    lives,
    make_directory,
    read_manifest,
    read_records,
    scan_records,
    trim_records,
    write_manifest,
)


def step(number: int, **changes: Any) -> Step:
    fields: dict[str, Any] = dict(
        worker=0, step=number, epoch=1, samples=64 * number, loss=0.5, time=0.1 * number,
        compute=0.08, communicate=0.01, wait=0.01, bytes_sent=1000 * number,
    )  # fmt: skip
    return Step(**fields | changes)


def evaluation(number: int) -> Evaluation:
    return Evaluation(split="validation", step=number, epoch=1, samples=64 * number, time=1.0, value=0.9, loss=0.3)


SUMMARY = Summary(
    task="digits", strategy="allreduce", world="local", workers=2, servers=0, seed=1, steps=9, samples=576, seconds=1.5,
    metric="accuracy", value=0.97, target=0.95, reached=True, time_to_target=1.2, bytes_sent=10, staleness_mean=None,
    staleness_max=None, events=1, out="runs/a",
)  # fmt: skip
LOST = Event(event="worker_lost", time=2.0, step=7, worker=1, detail="signal 9")
RECORDS: list[Record] = [step(1), evaluation(1), LOST, Event(event="stopped", time=3.0), SUMMARY]


def write(path: Path, records: list[Record]) -> None:
    with RecordWriter(path) as writer:
        for record in records:
            writer.write(record)


def test_written_records_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    write(path, RECORDS[:2])
    write(path, RECORDS[2:])  # appends
    assert scan_records(path) == (RECORDS, 0)
    kinds = [json.loads(line)["kind"] for line in path.read_text().splitlines()]
    assert kinds == ["step", "evaluation", "event", "event", "summary"]


def test_a_record_is_on_file_when_write_returns(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path / "r")
    writer.write(LOST)
    assert read_records(tmp_path / "r") == [LOST]
    writer.close()


def test_the_summary_has_every_key_of_the_json_object() -> None:
    assert list(json.loads(encode(SUMMARY))) == ["kind", *SUMMARY.__struct_fields__]


def test_numbers_that_json_lacks_survive(tmp_path: Path) -> None:
    write(tmp_path / "r", [step(1, loss=math.nan), step(2, loss=math.inf), step(3, loss=-math.inf)])
    losses = [record.loss for record in read_records(tmp_path / "r") if isinstance(record, Step)]
    assert math.isnan(losses[0]) and losses[1:] == [math.inf, -math.inf]
    for line in (tmp_path / "r").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_a_file_cut_anywhere_is_read_and_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "r"
    write(path, [step(1), step(2)])
    content = path.read_bytes()
    first = content.index(b"\n") + 1
    for cut in range(first, len(content) + 1):
        path.write_bytes(content[:cut])
        whole = cut >= len(content) - 1  # only the line break may be missing
        records: list[Record] = [step(1), step(2)] if whole else [step(1)]
        assert scan_records(path) == (records, 0 if whole or cut == first else 1)
        write(path, [LOST])
        assert scan_records(path) == ([*records, LOST], 0)


def test_a_long_cut_line_is_mended(tmp_path: Path) -> None:
    for length in (65535, 65536, 65537, 200_000):
        path = tmp_path / f"r{length}"
        write(path, [step(1)])
        with open(path, "ab") as file:
            file.write(b"x" * length)
        write(path, [step(2)])
        assert read_records(path) == [step(1), step(2)]


@pytest.mark.parametrize("junk", [b"nonsense", b'{"kind":"other"}', b'{"kind":"step"}', b"\xff\xfe", b"\0\0\0"])
def test_a_broken_line_in_the_middle_is_named(tmp_path: Path, junk: bytes) -> None:
    path = tmp_path / "r"
    path.write_bytes(encode(step(1)) + b"\n" + junk + b"\n" + encode(step(2)) + b"\n")
    with pytest.raises(BadInput, match=rf"line 2 of {path} is no record"):
        read_records(path)


def test_a_missing_file_is_bad_input_to_read_and_empty_to_trim(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot read"):
        read_records(tmp_path / "none")
    assert trim_records(tmp_path / "none", 5) == []


def test_trim_goes_back_to_a_step(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    without_step = Event(event="resumed", time=0.5)
    write(path, [step(1), without_step, step(5), evaluation(5), step(6), LOST, evaluation(6), SUMMARY])
    with open(path, "ab") as file:
        file.write(b'{"kind":"st')
    kept = [step(1), without_step, step(5), evaluation(5)]
    assert trim_records(path, 5) == kept
    assert read_records(path) == kept
    assert [entry.name for entry in tmp_path.iterdir()] == ["records.jsonl"]


def test_a_full_disk_fails_the_run_and_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        """Takes ten bytes and is full."""

        def __init__(self, file: Any) -> None:
            self.file, self.room = file, 10

        def write(self, data: memoryview) -> int:
            if not self.room:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.room = 0
            return int(self.file.write(data[:10]))

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

    path = tmp_path / "r"
    with RecordWriter(path) as writer:
        writer.write(step(1))
        monkeypatch.setattr(writer, "_file", Full(writer._file))
        with pytest.raises(RunFailed, match=f"cannot append to {path} .*No space left.*; free some space"):
            writer.write(step(2))
    assert scan_records(path) == ([step(1)], 0)


def test_an_unwritable_place_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="choose another --out"):
        RecordWriter(tmp_path / "none" / "records.jsonl")
    with pytest.raises(BadInput, match="choose another --out"):
        RecordWriter(tmp_path)


def manifest() -> Manifest:
    versions, hardware = describe_machine()
    return Manifest(
        torrential="0.1", config={"lr": 0.1, "set": {"a": [1, None]}}, versions=versions, hardware=hardware, seed=3,
        created="2030-01-01T00:00:00+00:00", command=["torrential", "train", "digits"],
    )  # fmt: skip


def test_a_manifest_is_read_back(tmp_path: Path) -> None:
    written = manifest()
    write_manifest(tmp_path, written)
    assert read_manifest(tmp_path) == written
    assert [entry.name for entry in tmp_path.iterdir()] == ["manifest.json"]
    assert {"python", "torch", "numpy", "platform"} <= written.versions.keys()
    assert written.hardware["cores"] >= 1 and written.hardware["memory"] > 0


def test_a_manifest_that_cannot_be_used_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="is no run"):
        read_manifest(tmp_path / "none")
    with pytest.raises(BadInput, match=r"manifest\.json is missing"):
        read_manifest(tmp_path)
    write_manifest(tmp_path, manifest())
    path = tmp_path / "manifest.json"
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(BadInput, match="is damaged"):
        read_manifest(tmp_path)
    path.write_bytes(content.replace(b'"format": 1', b'"format": 2'))
    with pytest.raises(BadInput, match="format 2 and this version reads 1"):
        read_manifest(tmp_path)


def test_the_directory_of_a_new_run_is_empty(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    for _ in range(2):  # empty is as good as new
        make_directory(path)
        check_new_directory(path)
        assert list(path.iterdir()) == []
    (path / "records.jsonl").touch()
    make_directory(path)
    with pytest.raises(BadInput, match=rf"not empty.*--resume {path}"):
        check_new_directory(path)


def test_a_run_directory_that_cannot_be_written_is_bad_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(BadInput, match="not a directory"):
            make_directory(path)

    def refuse(self: Path, data: bytes) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    (tmp_path / "file").unlink()
    monkeypatch.setattr(Path, "write_bytes", refuse)  # file modes do not stop the superuser
    with pytest.raises(BadInput, match=r"Permission denied.*choose another --out"):
        check_new_directory(tmp_path)


def test_reading_records_never_imports_torch() -> None:
    source = Path(__file__).parents[1] / "torrential" / "records.py"
    program = (  # the module alone: what the package's __init__ imports is its own affair
        "import importlib.util, sys, types; sys.modules['torrential'] = package = types.ModuleType('torrential');"
        f"package.__path__ = [{str(source.parent)!r}]; import torrential.records as r; r.describe_machine();"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_a_process_that_nobody_has_asked_about_since_it_ended_does_not_live() -> None:
    assert lives(os.getpid())
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # it has ended, and is still in the table
    assert Path("/proc", str(child)).exists() and not lives(child)
    os.waitpid(child, 0)
    assert not lives(child)
