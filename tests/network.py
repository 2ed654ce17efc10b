"""A network in memory for roles that live by letters: one process, one thread, every order of events by a seed.

    hub = Hub(seed=7)
    hub.start(0, program)           # a role is a greenlet; program(comm) runs until it returns or is killed
    hub.run()                       # picks at random who goes on and which letter arrives next

Letters of one role to another stay in order; those of different pairs overtake each other as the seed wills. When
nobody can go on, the clock jumps to the next timeout; without one, `run` raises Deadlock, which names the seed and who
waits for what; so it does when there is no end of events.
Pieces of registered buffers travel by reference, as in shared memory; everything else is copied.
"""

import random
from collections import deque

import torch
from greenlet import GreenletExit, getcurrent, greenlet

from torrential.comm.protocol import SERVERS, Letter, Meter, letter_by_letter
from torrential.optimizers import OptimizerSpec
from torrential.params.base import Finished
from torrential.params.layout import Bucket, Layout, ParameterEntry
from torrential.server import ring
from torrential.server.client import Client
from torrential.server.consistency import Consistency
from torrential.server.messages import View
from torrential.server.server import Server
from torrential.server.shard import Initial

MOST_EVENTS = 300_000
TICK = 1e-3  # seconds of the network's clock from one event to the next


class Deadlock(AssertionError):
    pass


class Hub:
    def __init__(self, seed=0, *, duplicate=0.0, drop=0.0):
        self.seed, self.random = seed, random.Random(seed)
        self.duplicate, self.drop = duplicate, drop  # of letters between workers and servers
        self.now = 0.0
        self.comms = {}
        self.view = View(-1, (), ())
        self._links = {}  # (from, to): letters under way
        self._busy = []  # pairs with letters under way
        self.bytes = {}  # (from, to): of tensors posted
        self.delays = {}  # (from, to): until when letters of this pair are held up
        self.failures = []
        self.watch = lambda source, to, message: None
        self.each = lambda: None  # called between any two events

    # -- roles ---------------------------------------------------------------------------------------------------------
    def start(self, address, program):
        comm = self.comms[address] = MemoryComm(self, address)
        comm.greenlet = greenlet(lambda: self._play(comm, program))
        return comm

    def _play(self, comm, program):
        try:
            comm.result = program(comm)
        except GreenletExit:
            pass
        except BaseException as error:
            self.failures.append((comm.address, error))
        comm.over = True

    def kill(self, address):
        """What it has sent may still arrive, up to some point; nothing arrives at it any more."""
        comm = self.comms.pop(address)
        comm.over = True
        if comm.greenlet is not getcurrent() and not comm.greenlet.dead and comm.greenlet:
            comm.greenlet.throw(GreenletExit)
        for (source, to), letters in self._links.items():
            if source == address:
                for _ in range(self.random.randint(0, len(letters))):
                    letters.pop()
            elif to == address:
                letters.clear()

    def under_way(self):
        return any(self._links.values()) or any(c.inbox for c in self.comms.values() if not c.over)

    # -- letters -------------------------------------------------------------------------------------------------------
    def send(self, source, to, message, tensors):
        self.watch(source, to, message)
        lossy = source >= 0 and (source < SERVERS) != (to < SERVERS)
        if lossy and self.random.random() < self.drop:
            return
        self._queue(source, to, Letter(source, message, tensors))
        if lossy and self.random.random() < self.duplicate:
            at = self.random.randint(0, len(self._links[source, to]))
            late = list(self._links[source, to])
            late.insert(at, Letter(source, message, tensors))
            order = late if at else [*late[1:], late[0]]  # a copy never comes before the letter itself
            self._links[source, to] = deque(order)

    def _queue(self, source, to, letter):
        pair = source, to
        letters = self._links.get(pair)
        if letters is None:
            letters = self._links[pair] = deque()
        if not letters:
            self._busy.append(pair)
        letters.append(letter)

    def announce(self, workers, table):
        self.view = View(self.view.version + 1, tuple(sorted(workers)), table)
        for address in list(self.comms):
            self._queue(-1, address, Letter(-1, self.view, []))

    # -- events --------------------------------------------------------------------------------------------------------
    def run(self, until=None):
        """Until all roles but servers are over, or until `until` says so."""
        until = until or (lambda: all(comm.over or address >= SERVERS for address, comm in self.comms.items()))
        for _ in range(MOST_EVENTS):
            if until():
                return
            if self.failures:
                address, error = self.failures.pop()
                raise AssertionError(f"role {address} failed (seed {self.seed}): {error!r}") from error
            self.now += TICK
            self.each()
            if not self._event():
                self._idle()
        raise self._stuck("there is no end of it")

    def _stuck(self, how):
        waiting = {c.address: c.last for c in self.comms.values() if not c.over and c.address < SERVERS}
        return Deadlock(f"{how} (seed {self.seed}); the last words of those who wait: {waiting}")

    def _event(self):
        now = self.now
        ready = [c for c in self.comms.values() if not c.over and c.asleep <= now and (not c.waiting or c.inbox)]
        while self._busy or ready:
            pick = self.random.randrange(len(self._busy) + len(ready))
            if pick >= len(self._busy):
                self._go_on(ready[pick - len(self._busy)])
                return True
            pair = self._busy[pick]
            letters = self._links[pair]
            if letters and self.delays.get(pair, 0.0) > self.now:
                held = [p for p in self._busy if self.delays.get(p, 0.0) > self.now]
                if len(held) == len(self._busy) and not ready:
                    return True  # time goes on
                continue
            letter = letters.popleft() if letters else None
            if not letters:
                self._busy[pick] = self._busy[-1]
                self._busy.pop()
            to = self.comms.get(pair[1])
            if letter is not None and to is not None and not to.over:
                if isinstance(letter.message, View) and letter.message.version > to.view.version:
                    to.view = letter.message
                to.inbox.append(letter)
                return True
        return False

    def _idle(self):
        """Nothing is under way: whoever sleeps, or waits with a timeout, does so no longer."""
        moments = [
            (c.asleep if c.asleep > self.now else c.deadline, c.address)
            for c in self.comms.values()
            if not c.over and (c.asleep > self.now or c.deadline is not None)
        ]
        if not moments:
            raise self._stuck("nobody can go on")
        moment, address = min(moments)
        self.now = max(self.now, moment)
        self._go_on(self.comms[address])

    def _go_on(self, comm):
        comm.waiting = False
        comm.greenlet.switch()


class MemoryComm:
    """What torrential.comm.protocol.Mail asks for."""

    shares_memory = True

    def __init__(self, hub, address):
        self.hub, self.address, self.rank = hub, address, address
        self.view, self.meter = hub.view, Meter()
        self.inbox, self.waiting, self.over, self.deadline = deque(), False, False, None
        self.greenlet, self.last, self.result = None, None, None
        self.asleep = 0.0  # until then
        self._buffers, self._registered = {}, set()

    def now(self):
        return self.hub.now

    def sleep(self, seconds):
        """Lets others go on; letters wait."""
        self.asleep = self.hub.now + seconds
        while self.hub.now < self.asleep:
            self.hub_switch()

    def hub_switch(self):
        self.greenlet.parent.switch()

    def stop_requested(self):
        return False

    def buffer(self, name, numel, dtype, *, common=False, rank=None):
        if name not in self._buffers:
            self._buffers[name] = torch.zeros(numel, dtype=dtype)
            self._registered.add(self._buffers[name].untyped_storage().data_ptr())
        return self._buffers[name]

    def post(self, to, message, tensors=()):
        self.last = to, message
        carried = [t if t.untyped_storage().data_ptr() in self._registered else t.clone() for t in tensors]
        size = sum(t.nbytes for t in tensors)
        self.meter.bytes_sent += size
        self.hub.bytes[self.address, to] = self.hub.bytes.get((self.address, to), 0) + size
        self.hub.send(self.address, to, message, carried)
        return Finished()

    def receive(self, timeout=None):
        if not self.inbox:
            if timeout == 0.0:
                return None
            self.deadline = None if timeout is None else self.hub.now + timeout
            self.waiting = True
            self.hub_switch()
            self.waiting, self.deadline = False, None
        return self.inbox.popleft() if self.inbox else None

    read = letter_by_letter


def flat_layout(numel, dtype=torch.float32, sizes=None):
    """A model of tensors of these sizes (default: one), without gaps."""
    entries, start = [], 0
    for size in sizes or [numel]:
        entries.append(ParameterEntry(len(entries), f"p{len(entries)}", torch.Size([size]), dtype, start))
        start += size
    assert start == numel
    return Layout(tuple(entries), (Bucket(0, dtype, tuple(entries)),), {dtype: numel})


class Cluster:
    """Servers, workers and who keeps the view."""

    def __init__(
        self, hub, numel, *, servers=1, workers=(0,), replicas=0, consistency=None, spec=None, dtype=torch.float32,
        initial=None, sizes=None, handlers=None, dealer=None, resend=None,
    ):  # fmt: skip
        self.hub, self.numel, self.dtype, self.replicas, self.resend = hub, numel, dtype, replicas, resend
        self.layout = flat_layout(numel, dtype, sizes)
        self.spec = spec or OptimizerSpec(torch.optim.SGD, 1.0)
        self.consistency = consistency or Consistency(None)
        self.handlers = handlers
        self.workers, self.roles, self.created = set(workers), {}, servers
        self.table = ring.begin([SERVERS + j for j in range(servers)], numel, replicas)
        hub.view = View(hub.view.version + 1, tuple(sorted(self.workers)), self.table)
        vector = torch.zeros(numel, dtype=dtype) if initial is None else initial
        for j in range(servers):
            self._start_server(SERVERS + j, Initial(vector, dealer=dealer))

    def _start_server(self, address, initial=None):
        def program(comm):
            self.roles[address] = Server(
                comm, self.layout, self.spec, self.consistency, initial=initial, handlers=self.handlers,
                filled=lambda version: self._filled(address, version),
            )  # fmt: skip
            self.roles[address].run()

        self.hub.start(address, program)

    def work(self, rank, program):
        """program(client, comm) as worker `rank`."""
        self.hub.start(rank, lambda comm: program(self.client(comm), comm))

    def client(self, comm):
        return Client(comm, self.numel, self.dtype, resend=self.resend, timeout=1e6)

    def add_worker(self, rank, program):
        self.workers.add(rank)
        self.announce()
        self.work(rank, program)

    def remove_worker(self, rank):
        self.hub.kill(rank)
        self.workers.discard(rank)
        self.announce()

    def kill_server(self, address):
        self.hub.kill(address)
        self.roles.pop(address, None)
        self.table = ring.leave(self.table, address, self.replicas)
        self.announce()

    def add_server(self):
        address = SERVERS + self.created
        self.created += 1
        self.table = ring.join(self.table, address, self.replicas)
        self.announce()
        self._start_server(address)
        return address

    def _filled(self, address, version):
        if any(r.heir == address for r in self.table) and version >= self.hub.view.version:
            self.table = ring.promote(self.table, address, self.replicas)
            self.announce()

    def announce(self):
        self.hub.announce(self.workers, self.table)

    def settled(self):
        """Whether every server holds what the newest view says."""
        return all(
            address in self.roles
            and self.roles[address].view.version == self.hub.view.version
            and all(link.current for link in self.roles[address]._links.values())
            for address in self.hub.view.servers()
        )

    def safe_to_kill(self, address):
        """Whether whoever answers for its ranges then has them."""
        for r in self.table:
            chain = [a for a in r.chain if a != address]
            links = self.roles[chain[0]]._links.values() if chain and chain[0] in self.roles else ()
            if not any(link.start <= r.start and r.stop <= link.stop and link.holds for link in links):
                return False
        return True

    def values(self):
        """The parameters, read where they lie."""
        found = torch.empty(self.numel, dtype=self.dtype)
        for r in self.table:
            found[r.start : r.stop] = self.roles[r.chain[0]].store.parameters[r.start : r.stop]
        return found

    def shards(self):
        return [self.roles[r.chain[0]]._links[r.start].shard for r in self.table]
