"""What must hold in a run, whatever happens to it: looked at between any two events, and at the end.

- the members of an all-reduce have the same parameters, bit for bit, after the same number of steps; and in the end
  those that plain training on the joined batches comes to
- pushes: testing/ledger.py
- of workers that execute a clock, none is more than `staleness` clocks ahead of another (server/consistency.py)
- every range's replicas are equal to its head once nothing is under way
- it ends: nobody waits for ever, and a run fails only when what it needs is really gone
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import torch
from torch import Tensor

from torrential.comm.protocol import SERVERS, Letter
from torrential.data.batches import Batches
from torrential.data.deal import Deal, order
from torrential.membership.machine import Membership
from torrential.server.messages import Done, Push, Range, Refused, Take
from torrential.server.server import Server
from torrential.server.shard import Shard
from torrential.strategies.base import needs_servers
from torrential.testing.events import EVENTS, Happened
from torrential.testing.ledger import Ledger
from torrential.trainer.context import RoleContext
from torrential.trainer.randomness import seed_all
from torrential.trainer.server_plan import ServerPlan
from torrential.trainer.snapshot import Snapshot
from torrential.worlds.base import Job
from torrential.worlds.sim.kernel import Kernel
from torrential.worlds.sim.mail import Hub

MOST_SECONDS = 600.0  # virtual ones
MOST_EVENTS = 200_000
QUIET_SECONDS = 10.0  # after the end, until what was under way has arrived


class Violation(Exception):
    """Something that must hold does not."""


class Audit:
    """Implements worlds.sim.world.Watch."""

    def __init__(self, job: Job, linear: bool) -> None:
        """`linear`: parameters are sums of what was pushed."""
        self._job, self._linear = job, linear
        self._wrong: list[str] = []
        self.events: deque[Happened] = deque(maxlen=EVENTS)
        self._roles: dict[int, RoleContext | Server] = {}  # the living, by address
        self._living = -1
        self._first: tuple[Range, ...] = ()  # the table that servers begin with
        self._executing: dict[int, int] = {}  # clocks, by worker
        self._steps: dict[int, int] = {}  # taken by each worker, when we last looked
        self._parameters: dict[int, dict[int, bytes]] = {}  # by step, by member
        self._taken: dict[int, int] = {}  # samples, by step
        self.lost = ""  # what is gone, so that the run may fail
        self._ledger: Ledger | None = None
        if needs_servers(job.strategy):
            plan = ServerPlan(job.task, job.config, job.strategy)
            self._consistency = plan.consistency
            self._ledger = Ledger(plan.initial().parameters, plan.consistency, self._complain)

    def _complain(self, what: str) -> None:
        """Note a violation inside of a role; it is raised between events."""
        self._wrong.append(what)

    def raise_violation(self) -> None:
        if self._wrong:
            raise Violation(self._wrong[0])

    # -- what the world tells -------------------------------------------------------------------------------------
    def begin(self, kernel: Kernel, hub: Hub, membership: Membership) -> None:
        self._kernel, self._hub, self._membership = kernel, hub, membership
        kernel.happens = lambda *what: self.events.append(what)
        kernel.between = self._between
        hub.posted = self._posted

    def role(self, address: int, role: RoleContext | Server) -> None:
        self._roles[address] = role
        self._steps[address] = 0

    def snapshot(self, snapshot: Snapshot, flat: Mapping[str, Tensor]) -> None:
        """What a checkpoint holds. Not looked at where letters are lost, for marks count on those before them
        (server/copies.py), nor where the first few pushes make a step: these may be others on another range."""
        if self._ledger is None or snapshot.dealer is None or not self._linear:
            return
        if not self._hub.cluster.accidents.loss and self._consistency.first is None:
            what = f"parameters of the checkpoint at {snapshot.step}"
            self._ledger.explain(flat["float64"], self._table(), what, snapshot.dealer)

    def end(self) -> None:
        """All workers are finished; servers may still have something to tell each other."""
        until = self._kernel.now + QUIET_SECONDS
        while self._kernel.now < until and not self._kernel.failures and self._kernel.step():
            pass
        self.raise_violation()
        finished = self._job.config.steps is None
        if self._ledger is None:
            self._compare_with_plain_training(finished)
        elif not self.lost:
            self._check_servers(finished)
        self.raise_violation()

    # -- between events -------------------------------------------------------------------------------------------
    def _between(self) -> None:
        if len(self._hub.mails) != self._living:
            self._first = self._first or self._table()
            self._living = len(self._hub.mails)
            for address in [a for a, role in self._roles.items() if self._hub.mails.get(a) is not role.comm]:
                self._died(address)
            self._find_losses()
        if self._ledger is None:
            for rank, worker in self._roles.items():
                if worker.step != self._steps[rank]:  # type: ignore[union-attr]
                    self._stepped(rank, worker)  # type: ignore[arg-type]
        if self._kernel.now > MOST_SECONDS or self._kernel.events > MOST_EVENTS:
            self._complain("there is no end of it")
        if self._wrong:
            raise Violation(self._wrong[0])

    def _died(self, address: int) -> None:
        del self._roles[address]
        self._executing.pop(address, None)
        for by_member in self._parameters.values():
            by_member.pop(address, None)
        if self._ledger is None:
            if all(worker.applied < 0 for worker in self._roles.values()):  # type: ignore[union-attr]
                self.lost = "all workers that had parameters"
        elif address < SERVERS:
            self._ledger.died(address)

    def _find_losses(self) -> None:
        """Whether something is gone that the run cannot go on without."""
        for r in self._table():
            if not any(self._holds(member, r) for member in r.chain):
                self.lost = f"parameters {r.start} to {r.stop}"
        if not any(address < SERVERS for address in self._hub.mails):
            self.lost = "all workers"

    def _holds(self, address: int, r: Range) -> bool:
        server, mail = self._roles.get(address), self._hub.mails.get(address)
        if server is None and mail is not None and mail.who.life == 0:  # it waits for its first view
            first = (given for given in self._first if given.start <= r.start and r.stop <= given.stop)
            return any(address in given.chain for given in first)
        links = server._links.values() if isinstance(server, Server) else ()
        return any(link.start <= r.start and r.stop <= link.stop and link.holds for link in links)

    # -- letters --------------------------------------------------------------------------------------------------
    def _posted(self, source: int, to: int, letter: Letter) -> None:
        assert self._ledger is not None
        message = letter.message
        match message:
            case Done():
                self._ledger.answered(to, message, letter.tensors)
                if message.finished:
                    self._executing.pop(to, None)
            case Push():
                self._executing.pop(source, None)
                self._ledger.pushed(source, message, letter.tensors)
            case Take():
                self._executes(source, message.clock)
            case Refused():
                self._complain(f"a request was refused: {message.reason}")

    def _executes(self, worker: int, clock: int) -> None:
        """Note that a worker has begun this clock, and check that no other is too far from it."""
        staleness = self._consistency.staleness
        if staleness is None or self._consistency.first is not None:
            return
        self._executing[worker] = clock
        for other, at in self._executing.items():
            if abs(clock - at) > staleness and other not in self._membership.finished:
                self._complain(
                    f"worker {worker} began clock {clock} while worker {other} executes clock {at} "
                    f"(staleness: {staleness})"
                )

    # -- members of an all-reduce ---------------------------------------------------------------------------------
    def _stepped(self, rank: int, worker: RoleContext) -> None:
        before, step = self._steps[rank], worker.step
        self._steps[rank] = step
        parameters = worker.replica.parameters
        assert parameters is not None
        flat = parameters.flat()
        mine = b"".join(flat[name].numpy().tobytes() for name in sorted(flat))
        members = self._parameters.setdefault(step, {})
        for other, theirs in members.items():
            if theirs != mine:
                self._complain(f"after step {step} workers {rank} and {other} have different parameters")
        members[rank] = mine
        if step == before + 1:
            self._taken[step] = worker.progress.samples - sum(self._taken.get(s, 0) for s in range(1, step))

    def _compare_with_plain_training(self, finished: bool) -> None:
        config, task = self._job.config, self._job.task
        workers = [w for w in self._roles.values() if isinstance(w, RoleContext)]
        steps, samples = workers[0].step, config.epochs * config.samples
        if len({w.step for w in workers}) > 1 or (finished and any(w.progress.samples != samples for w in workers)):
            self._complain(
                f"not all of it was done: {[(w.step, w.progress.samples) for w in workers]} of {samples} samples"
            )
            return
        model = _fresh(self._job)
        optimizer = task.optimizer_spec.build(model.parameters())
        deal, batches = Deal(config.samples, config.seed), Batches(task.train)
        for step in range(1, steps + 1):
            taken = self._taken[step]
            joined = order(config.samples, config.seed, deal.epoch)[deal.cursor : deal.cursor + taken]
            inputs, targets = batches.fetch(joined)
            optimizer.zero_grad()
            task.loss(model(inputs), targets).backward()
            optimizer.step()
            deal.advance(taken)
        for worker in workers:
            for mine, plain in zip(worker.replica.model.parameters(), model.parameters(), strict=True):
                off = float((mine - plain).detach().abs().max())
                if off > 1e-9:
                    self._complain(f"worker {worker.comm.rank} is off plain training by {off} after {steps} steps")

    # -- servers --------------------------------------------------------------------------------------------------
    def _check_servers(self, finished: bool) -> None:
        assert self._ledger is not None
        config, table = self._job.config, self._table()
        whole = torch.zeros(table[-1].stop, dtype=torch.float64)
        for r in table:
            head = self._shard(r.chain[0], r)
            whole[r.start : r.stop] = head.parameters
            for address in r.chain[1:]:
                self._compare(r, head, self._shard(address, r))
        self.raise_violation()
        if self._linear:
            self._ledger.explain(whole, table, "parameters")
        if not self._consistency.aggregates:
            self._ledger.versions(table, lambda r: self._shard(r.chain[0], r).version)
        self._ledger.coverage(config.samples, config.epochs, finished)
        dealer = self._shard(table[0].chain[0], table[0]).dealer
        assert dealer is not None
        if finished and (not dealer.finished() or dealer.used != dict.fromkeys(range(config.epochs), config.samples)):
            self._complain(f"the dealer is not at its end: {dealer}")

    def _table(self) -> tuple[Range, ...]:
        view = self._membership.view
        return () if view is None else view.table

    def _shard(self, address: int, r: Range) -> Shard:
        server = self._roles.get(address)
        link = server._links.get(r.start) if isinstance(server, Server) else None
        if link is None or not link.holds or not link.current or link.stop != r.stop:
            raise Violation(f"server {address - SERVERS} does not hold {r.start} to {r.stop}, long after the end")
        return link.shard

    def _compare(self, r: Range, head: Shard, replica: Shard) -> None:
        ours, theirs = head.metadata(), replica.metadata()
        names = [n for n in ours.__struct_fields__ if n != "answers" and getattr(ours, n) != getattr(theirs, n)]
        if head.number != replica.number:
            names.append("number")
        if {w: set(a) for w, a in ours.answers.items()} != {w: set(a) for w, a in theirs.answers.items()}:
            names.append("answers")
        for name in head.states:
            if not torch.equal(head.states[name], replica.states[name]):
                names.append(name)
        if not torch.equal(head.parameters, replica.parameters):
            names.append("parameters")
        if names:
            self._complain(f"a replica of {r.start} to {r.stop} differs from its head in {', '.join(names)}")


def _fresh(job: Job) -> torch.nn.Module:
    seed_all(torch.device("cpu"), job.config.seed, 0)
    return job.task.model()
