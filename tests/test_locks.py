"""Of several processes that want one directory at the same moment, one has it and the others are told."""

from __future__ import annotations

import collections
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command import CONTEXT
from made_up import question
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import torrential as tt
from torrential import opening, records
from torrential.errors import BadInput
from torrential.locks import lock_directory
from torrential.resolve import RunRequest
from torrential.study.directory import locked, open_directory

ROUNDS = 6


def task() -> tt.Task:
    data = TensorDataset(torch.ones(8, 3), torch.zeros(8, dtype=torch.int64))
    return tt.Task(model=lambda: nn.Linear(3, 2), loss=F.cross_entropy, train=data, test=data, batch_size=4, epochs=1)


def begin(directory: Path, seed: int = 0, at_once: Callable[[], object] = lambda: None) -> None:
    """All that comes before the directory is done when `at_once` is called."""
    before = records.make_directory

    def make(path: Path) -> None:
        at_once()
        before(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "make_directory", make)
        opening.open_run(RunRequest(task=task(), options={}, seed=seed), directory)


def resume(directory: Path, seed: int, at_once: Callable[[], object]) -> None:
    at_once()
    opening.resume_run(directory, task())


def study(directory: Path, seed: int, at_once: Callable[[], object]) -> None:
    at_once()
    lock = locked(directory)
    lock.__enter__()
    held.append(lock)
    open_directory(directory, question())


held: list[Any] = []  # a lock that is not referred to is given back


def contend(who: str, root: Path, barrier: Any, outcomes: Any) -> None:
    """Each round is about a directory of its own, and whoever wins keeps it to the end."""
    for number in range(ROUNDS):
        try:
            globals()[who](root / str(number), number, lambda: barrier.wait(60))
            outcomes.put((number, who, ""))
        except BadInput as error:
            outcomes.put((number, who, str(error)))
    barrier.wait(60)


def compete(root: Path, *who: str) -> list[list[tuple[str, str]]]:
    """By round: who came, and why it was refused, if it was."""
    barrier, outcomes = CONTEXT.Barrier(len(who)), CONTEXT.Queue()
    processes = [CONTEXT.Process(target=contend, args=(each, root, barrier, outcomes)) for each in who]
    for process in processes:
        process.start()
    found = collections.defaultdict(list)
    for _ in range(ROUNDS * len(who)):
        number, each, said = outcomes.get(timeout=60)
        found[number].append((each, said))
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    return [found[number] for number in range(ROUNDS)]


@pytest.mark.parametrize("who", [("begin",) * 3, ("begin", "study", "begin")], ids=["runs", "runs and a study"])
def test_a_new_directory_goes_to_one(who: tuple[str, ...], tmp_path: Path) -> None:
    for number, outcomes in enumerate(compete(tmp_path, *who)):
        (winner,) = (each for each, said in outcomes if not said)
        for _, said in outcomes:
            assert not said or "is not empty; choose another --out" in said or "is still going on; wait for it" in said
        kept = "study.json" if winner == "study" else records.MANIFEST
        assert os.listdir(tmp_path / str(number)) == [kept]


def test_nobody_comes_between_the_look_and_the_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, refused = records.write_manifest, []

    def late(directory: Path, manifest: records.Manifest) -> None:
        monkeypatch.setattr(records, "write_manifest", write)
        for other in (begin, lambda path: study(path, 0, lambda: None)):
            with pytest.raises(BadInput, match="is still going on; wait for it") as error:
                other(directory)
            refused.append(error)
        write(directory, manifest)

    monkeypatch.setattr(records, "write_manifest", late)
    begin(tmp_path / "run")
    assert len(refused) == 2 and os.listdir(tmp_path / "run") == [records.MANIFEST]
    opening.unlock(tmp_path / "run")


def test_a_run_is_resumed_by_one(tmp_path: Path) -> None:
    for number in range(ROUNDS):
        begin(tmp_path / str(number), seed=number)
        opening.unlock(tmp_path / str(number))
    for number, outcomes in enumerate(compete(tmp_path, "resume", "resume", "begin")):
        assert [each for each, said in outcomes if not said] == ["resume"]
        assert sum("is still going on; wait for it" in said for _, said in outcomes) >= 1
        assert records.read_manifest(tmp_path / str(number)).seed == number


def test_directories_without_a_name_given_are_not_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that begin in the same second."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda _: "now")
    assert [str(records.fresh_directory("digits")) for _ in range(3)] == [
        "runs/digits-now",
        "runs/digits-now-2",
        "runs/digits-now-3",
    ]


def test_a_directory_that_was_made_anew_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock of one that has been removed is worth nothing."""
    directory = tmp_path / "run"
    directory.mkdir()
    open_, made = os.open, []

    def late(*args: Any, **keywords: Any) -> int:
        fd = open_(*args, **keywords)
        if not made:
            directory.rmdir()
            made.append(directory.mkdir())
        return fd

    monkeypatch.setattr(os, "open", late)
    fd = lock_directory(directory, "run")
    assert os.path.samestat(os.fstat(fd), directory.stat())
    with pytest.raises(BadInput, match="is still going on"):
        lock_directory(directory, "run")
    os.close(fd)
    os.close(lock_directory(directory, "run"))


def test_what_cannot_be_locked_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.raises(BadInput, match=r"cannot lock .* \(No locks available\); choose a directory of this machine"):
        lock_directory(tmp_path, "run")
