"""Costs are found again from the times they make, predictions follow the table, and all members choose alike."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from torrential.comm import costs
from torrential.comm.choosing import Chooser, calibrate
from torrential.comm.costs import Fitted, Sample
from torrential.comm.schedules import ALGORITHMS
from torrential.comm.schedules.base import Costs
from torrential.records import Event, read_records

TRUE = Costs(latency=2e-4, byte=5e-10, reduce=2e-10)
SIZES = (1_000, 100_000, 10_000_000)
T74 = Costs(latency=100e-6, byte=1e-9, reduce=0.0)  # of T7.4, with 16 members
KB, MB = 10**3, 10**6


def samples(true: Costs, members: int = 4, noise: float = 0.0) -> list[Sample]:
    random = np.random.default_rng(0)
    adding = [Sample(costs.ADD, members, MB, true.reduce * MB)] if true.reduce else []
    return adding + [
        Sample(name, members, size, algorithm.seconds(members, size, true) * float(random.lognormal(0, noise)))
        for name, algorithm in ALGORITHMS.items()
        for size in SIZES
    ]


def table(members: int = 16, true: Costs = T74, **kw: Any) -> Fitted:
    return Fitted(machine=costs.machine(), transport="unix", members=members, when="", costs=true, **kw)


# -- fitting --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("true", [TRUE, Costs(1e-3, 1e-11, 2e-10), Costs(0.0, 1e-9, 3e-10)])
def test_known_costs_are_found_again(true: Costs) -> None:
    found = costs.fit(samples(true))
    assert found.latency == pytest.approx(true.latency, rel=1e-6, abs=1e-12)
    assert found.byte == pytest.approx(true.byte, rel=1e-6)
    assert found.reduce == pytest.approx(true.reduce, rel=1e-6, abs=1e-15)


def test_times_of_all_reduces_alone_do_not_tell_sending_from_adding() -> None:
    """Each algorithm sends two bytes for each that it adds: only the two together can be known."""
    found = costs.fit([s for s in samples(TRUE) if s.name != costs.ADD])
    assert found.latency == pytest.approx(TRUE.latency)
    assert 2 * found.byte + found.reduce == pytest.approx(2 * TRUE.byte + TRUE.reduce)


def test_noise_moves_predictions_little_and_no_cost_below_zero() -> None:
    found = costs.fit(samples(TRUE, noise=0.05))
    assert min(found.latency, found.byte, found.reduce) >= 0
    for algorithm in ALGORITHMS.values():
        for size in SIZES:
            assert algorithm.seconds(4, size, found) == pytest.approx(algorithm.seconds(4, size, TRUE), rel=0.1)


def test_times_that_want_a_negative_cost_get_none() -> None:
    """Large messages that are quicker than small ones: the best that costs can say is that bytes are free."""
    found = costs.fit([Sample("ring", 4, 1_000, 2e-3), Sample("ring", 4, 1_000_000, 1e-3)])
    assert found.byte == found.reduce == 0 and 1e-3 / 6 < found.latency < 2e-3 / 6


def test_a_line_for_what_is_no_schedule() -> None:
    found = costs.fitted([*samples(TRUE), *(Sample("native", 4, n, 1e-3 + 2e-9 * n) for n in SIZES)], "unix", 4, "")
    assert found.lines["native"] == pytest.approx((1e-3, 2e-9))
    assert found.predict("native", 4, 5 * MB) == pytest.approx(11e-3)
    assert set(found.names) == {*ALGORITHMS, "native"} and found.error() == pytest.approx(0, abs=1e-6)


# -- predicting and choosing ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("members", [2, 3, 16])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_predictions_are_the_table_of_costs(name: str, members: int) -> None:
    fitted = costs.fitted(samples(TRUE), "unix", 4, "")
    for nbytes in (4, 64 * KB, 100 * MB):
        assert fitted.predict(name, members, nbytes) == pytest.approx(
            ALGORITHMS[name].seconds(members, nbytes, TRUE), rel=1e-6
        )
        assert table(true=TRUE).predict(name, members, nbytes) == ALGORITHMS[name].seconds(members, nbytes, TRUE)


def test_what_an_algorithm_is_off_by_is_carried_to_other_sizes_and_members() -> None:
    slow = {"ring": [(KB, 2 * ALGORITHMS["ring"].seconds(16, KB, T74)), (MB, ALGORITHMS["ring"].seconds(16, MB, T74))]}
    fitted = table(measured=slow)
    for members in (3, 16):
        at = {n: fitted.predict("ring", members, n) / ALGORITHMS["ring"].seconds(members, n, T74) for n in (4, KB, MB)}
        assert at == pytest.approx({4: 2.0, KB: 2.0, MB: 1.0})
    between = fitted.predict("ring", 16, 31_623) / ALGORITHMS["ring"].seconds(16, 31_623, T74)
    assert between == pytest.approx(2**0.5, rel=1e-3)


def test_the_ratios_of_t74() -> None:
    def seconds(name: str, nbytes: int) -> float:
        return table().predict(name, 16, nbytes)

    for nbytes in (KB, 16 * KB, 256 * KB, MB):
        assert seconds("ring", nbytes) >= 1.5 * seconds("halving", nbytes)
    assert seconds("halving", 64 * MB) == pytest.approx(seconds("ring", 64 * MB), rel=0.05)
    assert seconds("tree", 64 * MB) == pytest.approx(seconds("ring", 64 * MB), rel=0.2)
    assert seconds("ring", 16 * KB) >= 2 * seconds("tree", 16 * KB)


def test_choosing_under_the_costs_of_t74() -> None:
    choice = table().choose(64 * KB, among=["ring", "halving"])
    assert (choice.name, choice.second) == ("halving", "ring") and "halving" in choice.reason
    assert table().choose(100 * MB).name in {"direct", "ring", "halving", "blocks"}
    assert table().choose(KB).name == "naive"  # two messages one after the other, and few bytes
    assert table().choose(KB, members=2, among=["tree"]).second == ""


def test_of_equals_the_first_is_chosen() -> None:
    assert table().choose(MB, among=["ring", "direct"]).name == table().choose(MB, among=["direct", "ring"]).name


# -- keeping --------------------------------------------------------------------------------------------------------
@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_the_cache_gives_back_what_it_got(home: Path) -> None:
    kept = costs.fitted(samples(TRUE), "unix", 4, "2026-01-01")
    costs.remember(kept)
    assert costs.load(costs.cache_path("unix", 4)) == kept
    assert costs.load(costs.cache_path("tcp", 4)) is None and costs.load(costs.cache_path("unix", 5)) is None
    assert [p.name for p in (home / "torrential").iterdir()] == [costs.cache_path("unix", 4).name]


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[]", b'{"format":1}', b'{"format":99}'])
def test_a_damaged_cache_is_ignored(home: Path, content: bytes) -> None:
    path = costs.cache_path("unix", 4)
    path.parent.mkdir()
    path.write_bytes(content)
    assert costs.load(path) is None


def test_a_table_of_another_machine_or_format_is_ignored(home: Path) -> None:
    kept = costs.fitted(samples(TRUE), "unix", 4, "")
    for change in ({"machine": "another"}, {"format": 99}, {"measured": {}}, {"measured": {"gone": [(1, 1.0)]}}):
        costs.remember(msgspec.structs.replace(kept, **change))
        assert costs.load(costs.cache_path("unix", 4)) is None


@pytest.mark.parametrize(
    "change",
    [
        {"members": 0},
        {"costs": Costs(-1.0, 0.0, 0.0)},
        {"lines": {"ring": (-1.0, 0.0)}},
        {"measured": {"ring": []}},
        {"measured": {"ring": [(0, 1.0)]}},
        {"measured": {"ring": [(10**30, 1.0)]}},
        {"measured": {"ring": [(8, 1.0), (4, 1.0)]}},
        {"measured": {"ring": [(4, 0.0)]}},
    ],
    ids=str,
)
def test_a_table_that_no_measurement_can_have_given_is_ignored(home: Path, change: dict[str, Any]) -> None:
    path = home / "costs.json"
    kept = costs.fitted(samples(TRUE), "unix", 4, "")
    costs.save(path, kept)
    assert costs.load(path) == kept
    path.write_bytes(json.dumps(msgspec.to_builtins(kept) | msgspec.to_builtins(change)).encode())
    assert costs.load(path) is None


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    costs.remember(table())
    assert costs.load(costs.cache_path("unix", 16)) is None


# -- agreeing -------------------------------------------------------------------------------------------------------
class Meeting:
    """Members as threads of this process."""

    def __init__(self, members: int) -> None:
        self.barrier = threading.Barrier(members, timeout=20)
        self.board: dict[int, Tensor] = {}
        self.members = tuple(range(members))

    def run(self, program: Any) -> list[Any]:
        with ThreadPoolExecutor(len(self.members)) as pool:
            return [f.result(30) for f in [pool.submit(program, Member(self, rank)) for rank in self.members]]


class Done:
    def __init__(self, result: Any) -> None:
        self.result = result

    def wait(self, timeout: float | None = None) -> Any:
        return self.result


class Member:
    """As much of a Comm as choosing needs."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self.rank, self.members = meeting, rank, meeting.members
        self.calls: list[tuple[str, int]] = []

    def buffer(self, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype)

    def all_gather(self, vector: Tensor) -> Done:
        self.meeting.board[self.rank] = vector.clone()
        self.meeting.barrier.wait()
        everybody = torch.stack([self.meeting.board[rank] for rank in self.members])
        self.meeting.barrier.wait()
        return Done(everybody)

    def broadcast(self, tensor: Tensor, root: int) -> Done:
        pages = {rank: tensor for rank in self.members if rank == self.rank}
        self.meeting.board[self.rank] = pages[self.rank]
        self.meeting.barrier.wait()
        tensor.copy_(self.meeting.board[root])
        self.meeting.barrier.wait()
        return Done(None)

    def all_reduce(self, name: str, tensor: Tensor) -> None:
        """Everybody takes its own time."""
        self.calls.append((name, tensor.nbytes))
        time.sleep(1e-4 * (1 + self.rank) * (1 + (name == "naive")))


def test_members_measure_alike_and_come_to_the_same_table(home: Path) -> None:
    def program(member: Member) -> tuple[list[tuple[str, int]], Fitted]:
        data = torch.zeros(1 << 18)
        found = calibrate(
            member.all_reduce, lambda v: member.all_gather(v).wait(), list(ALGORITHMS), data, 3, "unix", 0.3, (KB, MB)
        )
        return member.calls, msgspec.structs.replace(found, when="")

    (calls, first), *others = Meeting(3).run(program)
    assert all(other == (calls, first) for other in others)
    assert set(first.measured) == set(ALGORITHMS)
    assert all(seconds > 3e-4 for points in first.measured.values() for _, seconds in points)  # the slowest's


def test_a_budget_that_is_too_small_still_gives_a_table(home: Path) -> None:
    def program(member: Member) -> Fitted:
        data = torch.zeros(1 << 18)
        agree = member.all_gather
        return calibrate(
            member.all_reduce, lambda v: agree(v).wait(), ["ring"], data, 2, "unix", 0.0, (KB, 10 * KB, MB)
        )

    first, _ = Meeting(2).run(program)
    assert [size for size, _ in first.measured["ring"]] == [KB, 10 * KB]


def test_choosers_agree_whoever_has_a_table(home: Path) -> None:
    """First nobody has one; then there is a file, and it is not measured again; then only one member has one."""

    def program(member: Member, known: Fitted | None = None) -> tuple[str | None, Fitted | None, list[str], int]:
        chooser = Chooser(member, member.all_reduce, ["ring", "halving"], "unix")  # type: ignore[arg-type]
        if known is not None and member.rank == 1:
            chooser.adopt(known)
        origin = chooser.agree_on_costs()
        return origin, chooser.table, [chooser.pick(n) for n in (4, KB, MB)], len(member.calls)

    (origin, measured, picks, calls), *others = Meeting(3).run(program)
    assert origin == "measured" and calls and all(o == (origin, measured, picks, calls) for o in others)
    for origin, found, again, calls in Meeting(3).run(program):
        assert (origin, found, again, calls) == ("known from an earlier run", measured, picks, 0)
    other = costs.fitted(samples(T74, 3), "unix", 3, "another")
    for origin, found, _, calls in Meeting(3).run(lambda member: program(member, other)):
        assert (origin, found, calls) == (None, other, 0)


def test_the_runs_own_copy_comes_first(home: Path) -> None:
    """So that a resumed run picks as it did, whatever was measured since."""
    own = home / "costs.json"
    costs.save(own, costs.fitted(samples(TRUE, 2), "unix", 2, "then"))
    costs.remember(costs.fitted(samples(T74, 2), "unix", 2, "since"))

    def program(member: Member) -> Fitted | None:
        chooser = Chooser(member, member.all_reduce, ["ring"], "unix", own)  # type: ignore[arg-type]
        chooser.agree_on_costs()
        return chooser.table

    assert [t.when for t in Meeting(2).run(program) if t] == ["then", "then"]


# -- in a run -------------------------------------------------------------------------------------------------------
def test_a_run_over_sockets_records_what_it_picks_and_why(run_cli: Any, home: Path) -> None:
    def run(name: str, transport: str) -> tuple[list[Event], dict[str, Any]]:
        args = ("--workers", 2, "--steps", 3, "--set", f"transport={transport}", "--out", home / name, "--json")
        done = run_cli("train", "digits", *args)
        assert done.returncode == 0, done.stderr
        events = [r for r in read_records(home / name / "records.jsonl") if isinstance(r, Event)]
        return [e for e in events if e.event == "algorithms_chosen"], json.loads(done.stdout)

    (first,), summary = run("first", "unix")
    measured, predicted = first.detail.split("; ", 1)
    assert measured.startswith("measured in ") and measured.endswith(" s, which count as time of the run")
    assert predicted.startswith("predicted from times at 1,024 to ") and predicted.count(" ms, next ") == 6
    assert "100,000,000 bytes (extrapolated): " in predicted
    assert costs.load(home / "first" / "costs.json") == costs.load(costs.cache_path("unix", 2)) is not None
    (second,), again = run("second", "unix")
    assert second.detail == f"known from an earlier run; {predicted}"
    assert again["bytes_sent"] == summary["bytes_sent"]  # measuring counts for nothing
