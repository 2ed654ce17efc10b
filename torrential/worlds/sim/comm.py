"""Comm for a worker of the simulated world: the shipped collectives over simulated messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NoReturn, TypeVar

from torch import Tensor, dtype

from torrential.comm.carrier import members_of_group
from torrential.comm.channel import Key
from torrential.comm.outbox import Outgoing
from torrential.comm.points import PointToPoint
from torrential.comm.protocol import COORDINATORS, Agreement, Handle, Part, role_name, role_of
from torrential.comm.scheduled import ScheduledCarrier
from torrential.comm.schedules import ALGORITHMS
from torrential.comm.schedules.base import Costs
from torrential.config import RunConfig
from torrential.errors import Regrouped, RunFailed, WaitedTooLong
from torrential.membership import messages as m
from torrential.membership.regrouping import leave, meet
from torrential.trainer.backward import FORWARD, GradientWork
from torrential.worlds.sim.group import SimMembership
from torrential.worlds.sim.mail import ADD, COPY, HEADER, Hub, SimMail, as_now
from torrential.worlds.sim.work_thread import WorkThread

PAUSE_SECONDS = 1.0  # of virtual time, between looks at the clock
MEMORY = 1e-10  # seconds per byte added up, where nothing else is known

SENT = Outgoing()  # the handle of every message: it is on its way at once
SENT.mark()

T = TypeVar("T")
W = TypeVar("W", m.Go, m.AllStopped)


class SimChannel:
    """Implements comm.channel.Channel."""

    lands = False  # what comes is copied when it is taken

    def __init__(self, comm: SimComm) -> None:
        self._comm, self.rank = comm, comm.rank
        self.generation = 0
        self._news = False
        self._arrived: dict[Key, list[Tensor]] = {}
        self._missed: set[Key] = set()  # looked for in vain since the last pause: nothing else is worth waking up for

    def regroup(self, generation: int) -> None:
        self.generation = generation
        for key in [k for k in self._arrived if k[1] < generation]:
            del self._arrived[key]

    def send(self, to: int, tag: str, tensors: Sequence[Tensor]) -> Outgoing:
        comm, hub = self._comm, self._comm.hub
        receiver = hub.mails.get(to)
        if receiver is not None:
            assert isinstance(receiver, SimComm)
            nbytes, copies = as_now(tensors)
            nbytes = HEADER + (0 if comm.together else nbytes)
            came = (self.rank, self.generation, tag), copies
            hub.network.send(comm.address, comm.host, to, receiver.host, nbytes, receiver.channel.deliver, *came)
        return SENT

    def deliver(self, key: Key, tensors: list[Tensor]) -> None:
        if key[1] >= self.generation:
            self._arrived[key] = tensors
            if key in self._missed:
                self.tell()

    def arrived(self, source: int, tag: str) -> bool:
        key = source, self.generation, tag
        if key in self._arrived:
            return True
        self._missed.add(key)
        return False

    def take(self, source: int, tag: str) -> list[Tensor]:
        return self._arrived.pop((source, self.generation, tag))

    def expect(self, source: int, tag: str, into: Sequence[Tensor]) -> None: ...

    def poll(self) -> None: ...

    def pause(self, seconds: float) -> None:
        """Wait until there is news; nothing has to be polled in the meantime."""
        if not self._news:
            began = self._comm.now()
            self._comm.role.wait(PAUSE_SECONDS)
            self._comm.span("wait", began)
        self._news = False
        self._missed.clear()

    def tell(self) -> None:
        self._news = True
        self._comm.role.wake()


class SimComm(SimMail):
    """Implements comm.protocol.Comm."""

    def __init__(
        self,
        hub: Hub,
        group: SimMembership,
        config: RunConfig,
        rank: int,
        seconds_per_sample: float,
        life: int = 0,
        host: int | None = None,
    ) -> None:
        super().__init__(hub, rank, hub.cluster.host_of_worker(rank) if host is None else host, life)
        self.rank, self._group, self._config = rank, group, config
        self.members: tuple[int, ...] = ()
        self._alone = False  # whether all members are on one host
        self.together = False  # whether they all see the same memory
        self.generation = 0
        self._newest = 0  # generation that was called
        self._check_joined: Callable[[], None] = lambda: None
        self._words: list[m.Go | m.AllStopped] = []
        self._dismissed = self._asked = False
        self.channel = SimChannel(self)
        self.carrier = ScheduledCarrier(rank, self.meter, self.check, config.settings.timeout, self.channel)
        self.carrier.complaints = self
        self._groups: dict[tuple[int, ...], SimGroup] = {}  # of this generation
        self._points = PointToPoint(self.channel, self.meter, self.check, config.settings.timeout, self)
        self._seconds_per_sample, self._batch = seconds_per_sample, 0
        self._later: list[tuple[float, Callable[[], None]]] = []
        self._thread: WorkThread | None = None

    # -- computing ------------------------------------------------------------------------------------------------
    def compute(self, samples: float, work: Callable[[], T], *, waits: bool = False) -> T:
        cluster, began, pool = self.hub.cluster, self.now(), self.hub.pool
        seconds = cluster.compute.seconds_per_step + samples * self._seconds_per_sample
        seconds *= cluster.factor(self._config.seed, self.rank, self._batch)
        self._batch += 1
        done = 0.0
        result: Any
        if isinstance(work, GradientWork):  # else there is nothing to compute
            done = FORWARD * seconds
            if pool is None:
                result = work()
                self.work(done)
            else:
                job = pool.begin(work)
                try:
                    self.work(done)
                except BaseException:  # it was killed at work
                    pool.forget(job)
                    raise
                result = pool.finish(job)
        elif waits:
            self._thread = WorkThread()
            result = self._thread.run(work)
        else:
            result = work()
        later, self._later = self._later, []
        for share, then in later:
            self.work(max(0.0, share * seconds - done))
            done = max(done, share * seconds)
            then()
        self.work(seconds - done)
        self.span("compute", began)
        self.hub.computed(samples)
        return result  # type: ignore[no-any-return]

    def within_work(self, wait: Callable[[], T]) -> T:
        assert self._thread is not None, "nothing is computed"
        return self._thread.outside(wait)

    def reached(self, share: float, then: Callable[[], None]) -> None:
        self._later.append((share, then))

    # -- collectives ----------------------------------------------------------------------------------------------
    def all_reduce(self, tensor: Tensor) -> Handle:
        if self.together:
            return _InMemory(self, tensor)
        name = self._config.settings.algorithm
        return self.carrier.all_reduce(tensor, self._pick(tensor.nbytes) if name == "auto" else name)

    def _pick(self, nbytes: int) -> str:
        network = self.hub.cluster.network
        latency, bandwidth = (
            (network.inside_latency, network.inside_bandwidth) if self._alone else (network.latency, network.bandwidth)
        )
        return quickest(len(self.members), nbytes, Costs(latency, 1 / bandwidth, MEMORY))

    def reduce_scatter(self, region: Tensor, parts: Sequence[Part]) -> Handle:
        return self.carrier.reduce_scatter(region, parts)

    def all_gather(self, vector: Tensor) -> Handle:
        if self.together:
            self.read_others()
        return self.carrier.all_gather(vector)

    def read_others(self) -> None:
        """Read what every other member has put into shared memory, where no letter is sent."""
        self.work(self.hub.cluster.inside.letter * (len(self.members) - 1))

    def broadcast(self, tensor: Tensor, root: int) -> Handle:
        return self.carrier.broadcast(tensor, root)

    def barrier(self) -> Handle:
        return self.carrier.barrier()

    # -- groups, and one member to another ---------------------------------------------------------------------------
    def group(self, ranks: Sequence[int]) -> SimGroup:
        members = members_of_group(self.rank, ranks, self.members)
        if members not in self._groups:
            carrier = ScheduledCarrier(
                self.rank,
                self.meter,
                self.check,
                self._config.settings.timeout,
                self.channel,
                f"{','.join(map(str, members))}:",
            )
            carrier.complaints, carrier.among = self, f" among workers {', '.join(map(str, members))}"
            carrier.regroup(self.generation, members)
            self._groups[members] = SimGroup(carrier)
        return self._groups[members]

    def process_group(self) -> NoReturn:
        raise RunFailed("torch.distributed connects real processes; use --world local")

    def send(self, tensor: Tensor, to: int, tag: str = "") -> Handle:
        return self._points.send(tensor, to, tag)

    def recv(self, into: Tensor, source: int, tag: str = "") -> Handle:
        return self._points.recv(into, source, tag)

    def pass_on(self, tensor: Tensor, to: int, tag: str, room: int) -> Handle:
        return self._points.pass_on(tensor, to, tag, room)

    def take(self, sizes: Sequence[int], kind: dtype, source: int, tag: str, room: int) -> Handle:
        return self._points.take(sizes, kind, source, tag, room)

    def join(self, members: Sequence[int], era: int, check: Callable[[], None]) -> None:
        self.members, self._check_joined = tuple(members), check
        self.channel.regroup(era)
        self._points.regroup(self.rank, self.members, era)

    # -- membership -----------------------------------------------------------------------------------------------
    def hear(self, message: Any) -> None:
        match message:
            case m.Regroup(generation):
                self._newest = generation
            case m.AllStopped() | m.Go():
                self._words.append(message)
            case m.Dismissed():
                self._dismissed = True
            case m.Finish():
                self._asked = True
            case _:
                return super().hear(message)
        self.channel.tell()

    def check(self) -> None:
        self._check_joined()
        if self._newest > self.generation:
            raise Regrouped(self._newest)

    def regroup(self, stand: Callable[[], int]) -> Agreement:
        go = meet(self, stand)
        self.generation, self.members = go.generation, tuple(go.members)
        self._alone = len({self.hub.cluster.host_of_worker(rank) for rank in self.members}) == 1
        self.together = self.hub.shared and self._alone
        self.channel.regroup(self.generation)
        self.carrier.regroup(self.generation, self.members)
        self._points.regroup(self.rank, self.members, self.generation)
        self._groups.clear()
        return Agreement(self.generation, self.members, go.source, go.applied, tuple(go.behind))

    def begin(self) -> None:
        """Where workers do not regroup, wait for the word to begin; a coordinator begins with the first view."""
        if self.rank >= COORDINATORS:
            return super().begin()
        go = self.word(m.Go, 1)
        assert go is not None
        self.generation, self.members = go.generation, tuple(go.members)

    # -- implements membership.regrouping.Attendant ------------------------------------------------------------------
    def tell(self, message: Any) -> None:
        self._group.tell(self.who, message)

    def newer(self) -> int:
        self.until(lambda: self._newest > self.generation)
        return self._newest

    def word(self, kind: type[W], generation: int) -> W | None:
        while self._newest <= generation:
            while self._words:
                message = self._words.pop(0)
                if isinstance(message, kind) and message.generation == generation:
                    return message
            self.role.wait()
        return None

    def asked_to_finish(self, able: bool) -> bool:
        self.until(lambda: self._dismissed or self._newest > self.generation or (able and self._asked))
        if self._dismissed:
            return False
        self.check()
        self._asked = False
        return True

    # implements comm.protocol.Complaints
    def overdue(self, rank: int, what: str, seconds: float) -> None:
        self.tell(m.Overdue(rank, what, seconds))

    def relieved(self) -> None:
        self.tell(m.Relieved())

    def suspect(self, address: int, seconds: float) -> None:
        """Raise WaitedTooLong for a server: no role hangs here and all deaths are known, so the two are cut off from
        each other, or all wait for one another. A worker may be computing."""
        if role_of(address)[0] == "worker":
            return
        raise WaitedTooLong(role_name(address), seconds, "its answer")

    def leave(self, last: Callable[[], None] | None = None) -> None:
        leave(self, last)


class SimGroup:
    """Implements comm.protocol.Group, by messages."""

    def __init__(self, carrier: ScheduledCarrier) -> None:
        self._carrier, self.members = carrier, carrier.members
        self.reduce_scatter, self.all_gather = carrier.reduce_scatter, carrier.all_gather
        self.broadcast, self.barrier = carrier.broadcast, carrier.barrier

    def all_reduce(self, tensor: Tensor) -> Handle:
        return self._carrier.all_reduce(tensor)


class _InMemory:
    """A sum in shared memory: each copies out what others add up, and adds up its own slice of what they copied out.
    The slices of the sum need not be copied: each updates its own, and all see it (params/shared.py)."""

    def __init__(self, comm: SimComm, tensor: Tensor) -> None:
        self._comm, self._slices = comm, tensor.nbytes * (len(comm.members) - 1) / len(comm.members)
        comm.work_on(COPY * self._slices)
        self._sum = comm.carrier.all_reduce(tensor, "direct")

    def done(self) -> bool:
        return self._sum.done()

    def wait(self, timeout: float | None = None) -> None:
        self._sum.wait(timeout)
        self._comm.read_others()
        self._comm.work_on(ADD * self._slices)
        self._slices = 0.0


@lru_cache(maxsize=4096)
def quickest(members: int, nbytes: int, costs: Costs) -> str:
    """The algorithm that is the quickest by the table of costs; how messages meet on the way is not known here."""
    return min(ALGORITHMS, key=lambda name: ALGORITHMS[name].seconds(members, nbytes, costs))
