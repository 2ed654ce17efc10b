"""Runs read while they are written: what was added since, whatever becomes of the file meanwhile."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from made_up import config, history, manifest, write_run
from studies import full_study

from torrential import records
from torrential.errors import BadInput
from torrential.records import LONGEST_LINE, MANIFEST, RECORDS, Event, Step, encode, trim_records, write_manifest
from torrential.reporting import series
from torrential.study import tail
from torrential.study.read import read_run
from torrential.study.results import Run
from torrential.study.tail import RunTails


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A run that has not written a record yet."""
    write_manifest(tmp_path, manifest(config("ssp")))
    return tmp_path


def lines(looks: int = 4) -> list[bytes]:
    return [encode(record) + b"\n" for record in history(config("ssp"), 5.0, looks)]


def append(place: Path, data: bytes) -> None:
    with open(place / RECORDS, "ab") as file:
        file.write(data)


def length(run: Run) -> list[int]:
    return [len(run.steps), len(run.evaluations), len(run.events)]


def test_a_run_that_grows_by_any_bytes_is_read_like_one_that_has_ended(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[int] = []
    decode = records.decode_records
    monkeypatch.setattr(records, "decode_records", lambda data: (decoded.append(len(data)), decode(data))[1])
    data, random, read = b"".join(lines()), Random(0), RunTails()
    assert length(read(place)) == [0, 0, 0]
    at = 0
    while at < len(data):
        end = at + random.randint(1, 150)
        append(place, data[at:end])
        at = end
        whole = decode(data[: data.rfind(b"\n", 0, at) + 1])[0]
        found = read(place)
        assert found.steps == [record for record in whole if isinstance(record, Step)]
        assert found.summary is None or at >= len(data)
    assert read(place) == read_run(place)
    assert sum(decoded) == len(data)  # no byte was decoded twice


def test_a_run_in_which_nothing_has_changed_is_the_same_object(place: Path) -> None:
    read = RunTails()
    append(place, b"".join(lines()[:3]))
    first = read(place)
    assert read(place) is first
    append(place, lines()[3])
    assert read(place) is not first and read(place).problem == ""


def test_a_file_that_is_cut_is_read_from_its_beginning(place: Path) -> None:
    """As by a run that goes on from a checkpoint."""
    read = RunTails()
    append(place, b"".join(lines()))
    assert read(place).summary is not None and length(read(place)) == [8, 5, 0]
    trim_records(place / RECORDS, 100)
    cut = read(place)
    assert cut.summary is None and length(cut) == [4, 2, 0]
    append(place, encode(Event(event="resumed", time=2.5, step=100)) + b"\n")
    assert length(read(place)) == [4, 2, 1]


def test_a_file_that_is_rewritten_in_its_place_is_read_from_its_beginning(place: Path) -> None:
    read = RunTails()
    append(place, b"".join(lines()[:4]))
    assert length(read(place)) == [3, 1, 0]
    inode = os.stat(place / RECORDS).st_ino
    (place / RECORDS).write_bytes(b"".join(lines(looks=2)))
    assert os.stat(place / RECORDS).st_ino == inode
    assert length(read(place)) == [4, 3, 0]


def test_damaged_lines_are_left_out_and_counted(place: Path) -> None:
    read = RunTails()
    append(place, lines()[0] + b"{nonsense\n\n" + lines()[1] + b"\xff\xfe\n" + b"[" * 100_000 + b"\n")
    assert length(read(place)) == [2, 0, 0]
    assert read(place).problem == "3 damaged lines of its records are left out"
    append(place, lines()[3])
    assert length(read(place)) == [3, 0, 0]


def test_a_line_without_an_end_is_refused(place: Path) -> None:
    with open(place / RECORDS, "wb") as file:
        file.truncate(1 << 40)  # takes no room on the disk
    for _ in range(2):
        with pytest.raises(BadInput, match=f"has a line of more than {LONGEST_LINE:,} bytes, which is no record"):
            RunTails()(place)


def test_what_is_no_file_is_refused(place: Path) -> None:
    os.mkfifo(place / RECORDS)
    with pytest.raises(BadInput, match="no regular file"):
        RunTails()(place)


def test_a_directory_that_vanishes_is_read_again_when_it_is_back(tmp_path: Path) -> None:
    place, read = tmp_path / "run", RunTails()
    write_run(place, config("ssp"), 5.0)
    assert length(read(place)) == [8, 5, 0]
    shutil.rmtree(place)
    with pytest.raises(BadInput, match="is no run"):
        read(place)
    write_run(place, config("ssp"), 5.0, looks=1)
    assert length(read(place)) == [2, 2, 0]


def test_a_damaged_manifest_is_read_again_only_when_it_has_changed(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, looks = RunTails(), list[Path]()
    original = tail.read_known_manifest
    monkeypatch.setattr(tail, "read_known_manifest", lambda path: (looks.append(path), original(path))[1])
    good = (place / MANIFEST).read_bytes()
    (place / MANIFEST).write_bytes(b"{")
    for _ in range(3):
        with pytest.raises(BadInput, match="is damaged"):
            read(place)
    assert len(looks) == 1
    (place / MANIFEST).write_bytes(good)
    assert length(read(place)) == [0, 0, 0] and len(looks) == 2


def test_one_pass_reads_a_bounded_number_of_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail, "PASS_BYTES", 1)
    places = [tmp_path / name for name in "abc"]
    for place in places:
        write_run(place, config("ssp"), 5.0)
    read, found, behind = RunTails(), list[list[int]](), list[bool]()
    for _ in range(4):
        read.begin()
        found.append([len(read(place).steps) for place in places])
        behind.append(read.behind)
    assert found == [[8, 0, 0], [8, 8, 0], [8, 8, 8], [8, 8, 8]]
    assert behind == [True, True, False, False]


def test_runs_that_are_not_asked_for_any_more_are_forgotten(tmp_path: Path) -> None:
    write_run(tmp_path / "a", config("ssp"), 5.0)
    read = RunTails()
    first = read(tmp_path / "a")
    read.begin()
    assert read(tmp_path / "a") is first
    read.begin()
    read.begin()
    assert read(tmp_path / "a") is not first


# -- columns of a run that grows --------------------------------------------------------------------------------------
@pytest.mark.parametrize("entry", range(5))
def test_columns_that_are_extended_are_those_of_the_whole(entry: int) -> None:
    random = Random(entry)
    for run in full_study().entries[entry].runs:
        steps = [replace_dropped(step, i) for i, step in enumerate(run.steps)]
        growing = replace(run, steps=[])
        columns = series.work(growing)
        while len(growing.steps) < len(steps):
            growing.steps.extend(steps[len(growing.steps) :][: random.randint(1, 60)])
            columns = series.work(growing, columns)
        whole = series.work(replace(run, steps=steps))
        assert columns.worker.tolist() == whole.worker.tolist() and columns.time.tolist() == whole.time.tolist()
        assert {part: values.tolist() for part, values in columns.parts.items()} == {
            part: values.tolist() for part, values in whole.parts.items()
        }
        for name in ("staleness", "by_worker", "dropped", "newest"):
            assert getattr(columns.updates, name) == getattr(whole.updates, name)


def replace_dropped(step: Step, number: int) -> Step:
    """Gradients that came too late, counted from zero again and again, as by workers that are replaced."""
    return Step(**{name: getattr(step, name) for name in Step.__struct_fields__} | {"dropped": number % 37})
