"""Loaders: what they read is what is taken; guesses cost time alone; nobody is left behind, and the dead are named."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import torrential as tt
from torrential.config import LocalSettings, read_config
from torrential.data import loaders as loading
from torrential.data.deal import Deal, Order
from torrential.data.loaders import Loaders, Place, fork_loaders
from torrential.errors import RunFailed, TaskFailed, WaitedTooLong
from torrential.records import Event, read_manifest
from torrential.trainer.ahead import LookAhead

pytestmark = pytest.mark.timeout(60)


@contextmanager
def started(count: int, read: Callable[[Place], Any], timeout: float = 20.0) -> Iterator[tuple[Loaders, list[int]]]:
    """Loaders that are forked from here, and ended after the block."""
    processes = fork_loaders(3, count, lambda: read)
    try:
        yield Loaders(processes, timeout), [process.pid for process in processes]
    finally:
        for process in processes:
            process.line.close()
        for process in processes:
            try:
                os.waitpid(process.pid, 0)
            except ChildProcessError:
                continue  # a test has seen it die


def echo(place: Place) -> dict[str, Any]:
    return {"place": place, "by": os.getpid(), "big": torch.full((40_000,), float(place[1]))}


def test_what_was_expected_is_taken_in_any_order() -> None:
    with started(2, echo) as (loaders, pids):
        places = [(0, first, first + 4) for first in range(0, 40, 4)]
        loaders.expect(places)
        found = [loaders.take(place) for place in (places[1], places[0], *places[2:])]
        assert [batch["place"][1] for batch in found] == [4, 0, *range(8, 40, 4)]
        assert {batch["by"] for batch in found} == set(pids), "both have read some"
        assert all(float(batch["big"].mean()) == batch["place"][1] for batch in found)
        found[0]["big"].add_(1)  # it is ours to change


def test_a_wrong_guess_is_thrown_away() -> None:
    with started(1, echo) as (loaders, _):
        loaders.expect([(0, 0, 4), (0, 4, 8)])
        assert loaders.take((1, 2, 3))["place"] == (1, 2, 3), "never expected"
        loaders.expect([(0, 8, 12)])
        assert loaders.take((0, 8, 12))["place"] == (0, 8, 12)
        assert loaders.take((0, 0, 4))["place"] == (0, 0, 4), "thrown away, and read again"
        assert not loaders._ready and not loaders._expected


def test_no_more_is_read_ahead_than_two_batches_for_each(tmp_path: Path) -> None:
    def read(place: Place) -> Any:
        (tmp_path / str(place[1])).touch()
        return place

    with started(2, read) as (loaders, _):
        loaders.expect([(0, first, first + 1) for first in range(20)])
        deadline = time.monotonic() + 10
        while len(list(tmp_path.iterdir())) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert loaders.depth == 4 and sorted(file.name for file in tmp_path.iterdir()) == ["0", "1", "2", "3"]


def test_what_fails_in_a_loader_fails_when_it_is_taken() -> None:
    def read(place: Place) -> Any:
        if place[1] == 4:
            raise ValueError("rotten sample")
        return place

    with started(1, read) as (loaders, _):
        loaders.expect([(0, 0, 4), (0, 4, 8), (0, 8, 12)])
        assert loaders.take((0, 0, 4)) == (0, 0, 4)
        with pytest.raises(TaskFailed, match=r"the task's training data raised ValueError: rotten sample .*test_load"):
            loaders.take((0, 4, 8))
        assert loaders.take((0, 8, 12)) == (0, 8, 12)


def test_a_dead_loader_and_one_that_hangs_are_named() -> None:
    def read(place: Place) -> Any:
        time.sleep(30)

    with started(1, read, timeout=0.2) as (loaders, pids):
        with pytest.raises(WaitedTooLong, match=r"waited 0\.2 s for loader 0 of worker 3 \(the batch from 4 to 8 of"):
            loaders.take((0, 4, 8))
        os.kill(pids[0], signal.SIGKILL)
        with pytest.raises(RunFailed, match=r"loader 0 of worker 3 is gone \(killed by signal 9\)"):
            loaders.take((0, 8, 12))


# -- what is expected is what is taken ------------------------------------------------------------------------------
class Noted(Loaders):
    """Loaders that note what they are told to expect."""

    def __init__(self) -> None:
        super().__init__([], 1.0)
        self.depth = 4

    def expect(self, places: Any) -> None:
        self._expected = list(places)


def test_the_next_shares_are_expected() -> None:
    import made_up

    loaders, order = Noted(), Order(30, 0)
    config = made_up.config(samples=30, batch_size=4, epochs=2)
    ahead, deal = LookAhead(loaders, config, order, None), Deal(30, 0)
    seen = []
    while deal.epoch < 2:
        share = deal.share(1, 2, 4)
        places = [(batch.epoch, batch.first, batch.stop) for batch in share.batches]
        if seen:
            assert loaders._expected[: len(places)] == places, "as it was predicted one step before"
        ahead.share(deal, 1, 2, 1)
        assert loaders._expected[: len(places)] == places
        del loaders._expected[: len(places)]
        seen.append(places)
        deal.advance(share.total)
    assert len(seen) == 8 and loaders._expected == []


# -- in runs --------------------------------------------------------------------------------------------------------
class Slow:
    """Items that take a while to read; it leaves a mark in a directory for every process that reads."""

    def __init__(self, marks: Path, seconds: float = 0.002) -> None:
        self.marks, self.seconds = marks, seconds

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        (self.marks / str(os.getpid())).touch()
        time.sleep(self.seconds)
        return torch.tensor([float(index), 1.0]) / 400, index % 2


def task(train: Any, **changes: Any) -> tt.Task:
    held_out = TensorDataset(torch.ones(4, 2), torch.ones(4).long())
    given: dict[str, Any] = dict(
        model=lambda: nn.Linear(2, 2), loss=F.cross_entropy, train=train, validation=held_out, test=held_out, epochs=50
    )
    return tt.Task(**given | {"batch_size": 8} | changes)


def reading(marks: Path) -> list[psutil.Process]:
    """The loaders of a run that have read something and live."""
    found = []
    for mark in marks.iterdir():
        if psutil.pid_exists(int(mark.name)) and int(mark.name) != os.getpid():
            found.append(psutil.Process(int(mark.name)))
    living = [process for process in found if process.status() != psutil.STATUS_ZOMBIE]
    return [process for process in living if process.name().startswith("tt-loader")]


def kill_when(marks: Path, there: Callable[[list[psutil.Process]], psutil.Process | None]) -> threading.Thread:
    def look() -> None:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            if (victim := there(reading(marks))) is not None:
                return victim.kill()
            time.sleep(0.02)

    thread = threading.Thread(target=look)
    thread.start()
    return thread


def test_a_loader_that_dies_ends_the_run_in_one_line(tmp_path: Path) -> None:
    (marks := tmp_path / "marks").mkdir()
    killer = kill_when(marks, lambda found: found[0] if len(found) == 4 else None)
    with pytest.raises(tt.TorrentialError, match=r"loader \d of worker \d is gone \(killed by signal 9\); if memory"):
        tt.train(task(Slow(marks)), workers=2, loaders=2, device="cpu", progress=False, out=tmp_path / "run")
    killer.join()


def test_a_worker_that_dies_takes_its_loaders_along_and_the_others_go_on(tmp_path: Path) -> None:
    (marks := tmp_path / "marks").mkdir()
    killer = kill_when(marks, lambda found: found[0].parent() if len(found) == 4 else None)
    options: dict[str, Any] = dict(workers=2, loaders=2, device="cpu", progress=False, epochs=2)
    result = tt.train(task(Slow(marks)), **options, out=tmp_path / "run")
    killer.join()
    lost = [r for r in result.history if isinstance(r, Event) and r.event == "worker_lost"]
    assert len(lost) == 1 and result.summary.samples == 2 * 400  # processes left behind would fail the test, too
    assert reading(marks) == []


@pytest.mark.parametrize("strategy", ["downpour", "allreduce"])
def test_a_worker_that_takes_anothers_place_has_loaders_of_its_own(strategy: str, tmp_path: Path) -> None:
    (marks := tmp_path / "marks").mkdir()
    killer = kill_when(marks, lambda found: found[0].parent() if len(found) == 2 else None)
    options: dict[str, Any] = dict(workers=2, loaders=1, device="cpu", progress=False, epochs=2, restart=True)
    result = tt.train(task(Slow(marks)), strategy, **options, out=tmp_path / "run")
    killer.join()
    assert result.summary.samples == 2 * 400
    assert sum(isinstance(r, Event) and r.event == "worker_joined" for r in result.history) >= 1


def test_tensors_need_no_loaders_and_simulations_have_none(tmp_path: Path) -> None:
    tensors = TensorDataset(torch.ones(40, 2), torch.ones(40).long())
    options: dict[str, Any] = dict(steps=2, device="cpu", progress=False)
    result = tt.train(task(tensors), **options, loaders=2, out=tmp_path / "run")
    (warning,) = (r.detail for r in result.history if isinstance(r, Event) and r.event == "warning")
    assert warning == "loaders=2 has no effect: the training data is a TensorDataset, which is read at once"
    settings = read_config(read_manifest(result.out).config).settings
    assert isinstance(settings, LocalSettings) and settings.loaders == 0
    with pytest.raises(tt.TorrentialError, match="loaders is for real processes; leave it out, or use --world local"):
        tt.train(task(tensors), world="sim", loaders=1, **options)
    with pytest.raises(tt.TorrentialError, match="loaders must be a whole number of at least 0"):
        tt.train(task(tensors), loaders=-1, **options)


def test_a_reply_is_never_longer_than_its_message() -> None:
    def read(place: Place) -> Any:
        raise ValueError("x" * (2 * loading._REPLY_BYTES))

    with started(1, read) as (loaders, _), pytest.raises(TaskFailed, match="ValueError: xxx"):
        loaders.take((0, 0, 1))
