"""What random fault schedules (torrential/testing) found in servers, here letter by letter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import torch
from network import Hub, MemoryComm, flat_layout
from torch import Tensor

from torrential.comm.protocol import SERVERS, Letter
from torrential.optimizers import OptimizerSpec
from torrential.server import ring
from torrential.server.consistency import Consistency
from torrential.server.dealer import Dealer
from torrential.server.messages import LIFE_BITS, Done, Mark, Marking, Pull, Push, Request, Save, Take, View
from torrential.server.server import Server
from torrential.server.shard import Initial

NUMEL = 8


class Desk(MemoryComm):
    """Keeps what is posted."""

    def __init__(self, hub: Hub, address: int = SERVERS) -> None:
        super().__init__(hub, address)
        self.posted: list[tuple[int, Any]] = []

    def post(self, to: int, message: Any, tensors: Sequence[Tensor] = ()) -> None:
        self.posted.append((to, message))


class One:
    """A server alone, which is told letters and views one by one."""

    def __init__(self, consistency: Consistency, dealer: Dealer | None = None) -> None:
        hub = Hub()
        self._table = ring.begin([SERVERS], NUMEL)
        hub.view = View(1, (0, 1), self._table)
        self.desk = Desk(hub)
        spec = OptimizerSpec(torch.optim.SGD, 1.0)
        initial = Initial(torch.zeros(NUMEL), dealer=dealer)
        self.server = Server(self.desk, flat_layout(NUMEL), spec, consistency, initial=initial)

    def view(self, version: int, *workers: int) -> None:
        self.server.handle(Letter(-1, View(version, workers, self._table), []))

    def ask(self, kind: type[Request], worker: int, life: int, nth: int, view: int, **more: Any) -> None:
        seq = (life << LIFE_BITS) + nth
        tensors = [torch.ones(NUMEL)] if kind is Push else []
        request = kind(seq=seq, floor=seq, view=view, spans=((0, NUMEL),), **more)
        self.server.handle(Letter(worker, request, tensors))

    def answers(self, worker: int) -> list[Done]:
        return [message for to, message in self.desk.posted if to == worker and isinstance(message, Done)]

    @property
    def shard(self) -> Any:
        return self.server._links[0].shard


def test_a_push_that_is_addressed_anew_while_it_waits_is_answered_under_its_new_address() -> None:
    one = One(Consistency(0))
    one.ask(Push, 0, life=1, nth=1, view=1, clock=0, lr=1.0)
    one.view(2, 0, 1)
    one.ask(Push, 0, life=1, nth=1, view=2, clock=0, lr=1.0)
    one.ask(Push, 1, life=1, nth=1, view=1, clock=0, lr=1.0)
    assert [done.view for done in one.answers(0)] == [2]
    assert one.shard.parameters.tolist() == [-2.0] * NUMEL


@pytest.mark.parametrize("consistency", [Consistency(None), Consistency(0)], ids=["asynchronous", "synchronous"])
def test_a_save_that_is_addressed_anew_while_it_waits_is_answered_under_its_new_address(
    consistency: Consistency,
) -> None:
    one = One(consistency)
    one.ask(Push, 0, life=1, nth=1, view=1, clock=0, lr=1.0)
    one.ask(Save, 0, life=1, nth=2, view=1, clock=-1, number=1)
    one.view(2, 0, 1)
    one.ask(Save, 0, life=1, nth=2, view=2, clock=-1, number=1)
    cut = max(message.cut for _, message in one.desk.posted if isinstance(message, Marking))
    for worker in (0, 1):
        one.ask(Mark, worker, life=1, nth=3, view=2, clock=-1, number=1, cut=cut)
    one.ask(Push, 1, life=1, nth=4, view=2, clock=0, lr=1.0)
    saves = [done for done in one.answers(0) if done.seq & 0xFF == 2]
    assert [(done.view, bool(done.metadata)) for done in saves] == [(2, True)]


def test_what_a_worker_said_before_it_died_is_not_taken_for_its_successors_word() -> None:
    one = One(Consistency(0))
    for worker in (0, 1):
        one.ask(Push, worker, life=1, nth=1, view=1, clock=0, lr=1.0)
    one.view(2, 1)
    one.view(3, 0, 1)
    one.ask(Push, 0, life=1, nth=2, view=1, clock=1, lr=1.0)
    assert list(one.shard.clocks) == [1]
    one.ask(Pull, 0, life=3, nth=1, view=3, clock=1)
    one.ask(Push, 0, life=1, nth=2, view=1, clock=1, lr=1.0)
    one.ask(Push, 1, life=1, nth=2, view=3, clock=1, lr=1.0)
    assert one.shard.closed == 1  # the successor has not pushed
    one.ask(Push, 0, life=3, nth=2, view=3, clock=1, lr=1.0)
    assert one.shard.closed == 2 and one.shard.parameters.tolist() == [-4.0] * NUMEL


@pytest.mark.parametrize("first", [None, 1])
def test_clocks_that_nobody_is_left_to_push_for_are_closed(first: int | None) -> None:
    """All workers died and came back, where a range had been behind: they begin with the clock of the one ahead."""
    one = One(Consistency(0, first=first))
    for worker in (0, 1):
        one.ask(Pull, worker, life=1, nth=1, view=1, clock=2)
    assert one.shard.closed == 2 and one.shard.version == 0
    assert len(one.answers(0)) == len(one.answers(1)) == 1


def test_a_worker_that_was_dealt_nothing_is_dealt_nothing_when_its_request_comes_twice() -> None:
    """Samples that were given back in between went to a worker that did not wait for them, and nobody ever used them:
    the others went on for ever without any."""
    one = One(Consistency(1), Dealer(samples=3, epochs=1))
    one.ask(Take, 0, life=1, nth=1, view=1, clock=0, count=3)
    one.ask(Take, 1, life=1, nth=1, view=1, clock=0, count=3)
    one.view(2, 1)  # worker 0 is gone
    one.ask(Take, 1, life=1, nth=1, view=1, clock=0, count=3)
    assert [(done.lease, done.finished) for done in one.answers(1)] == [(0, False)] * 2
    assert one.shard.dealer.leases == {} and len(one.shard.dealer.returned) == 1
    one.ask(Take, 1, life=1, nth=2, view=2, clock=1, count=3)
    assert one.answers(1)[-1].indices == (0, 3)


def test_a_range_that_was_cut_while_its_contents_were_under_way_is_asked_for_again() -> None:
    """A server joins just when another's death has a range filled anew: the letter with the range as it was says
    nothing about its pieces, whose last operation would be on this server only when the next one came."""
    hub = Hub()
    whole = ring.begin([SERVERS, SERVERS + 1], NUMEL, replicas=1)[0]
    hub.view = View(1, (0,), (whole,))
    desk = Desk(hub, SERVERS + 1)
    spec, initial = OptimizerSpec(torch.optim.SGD, 1.0), Initial(torch.zeros(NUMEL))
    server = Server(desk, flat_layout(NUMEL), spec, Consistency(None), initial=initial)
    late, tensors = server._links[0].shard.state(view=1)
    middle = whole.stop // 2
    pieces = tuple(msgspec.structs.replace(whole, start=a, stop=b) for a, b in ((0, middle), (middle, whole.stop)))
    server.handle(Letter(-1, View(2, (0,), pieces), []))
    desk.posted.clear()
    server.handle(Letter(SERVERS, late, tensors))
    asked = [(to, message.start) for to, message in desk.posted if message.empty]
    assert asked == [(SERVERS, 0), (SERVERS, middle)]
