"""The invariants of a run under any faults: checked between any two events, and at the end.

- the members of an all-reduce, or of an average of local steps, have the same parameters, bit for bit, after the same
  number of steps, and the same of all other common state; in the end these, and those of every checkpoint, are what
  plain training on the joined batches comes to (where a round is one step): testing/plain.py
- on one vector without locks every minibatch counts once; elastic exchanges conserve the sum: testing/falling.py
- all workers of pipelines that have a parameter have the same bits of it after the same step; checkpoints of a model
  with batch norm, buffers too, are those of a run without faults: testing/pipelined.py
- pushes: testing/ledger.py
- of workers that execute a clock, none is more than `staleness` clocks ahead of another (server/consistency.py)
- every range's replicas are equal to its head once nothing is under way
- it ends: no role waits for ever, and a run fails only when the state that it needs is really gone
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from torrential.comm.protocol import SERVERS, Letter
from torrential.membership.machine import Membership
from torrential.params.layout import plan
from torrential.server.messages import Done, Push, Range, Refused, Take
from torrential.server.server import Server
from torrential.server.shard import Shard
from torrential.strategies.base import needs_servers
from torrential.strategies.hogwild import Hogwild
from torrential.testing.events import EVENTS, Happened
from torrential.testing.falling import TOLERANCE, misplaced
from torrential.testing.ledger import Ledger
from torrential.testing.pipelined import PipelineAudit
from torrential.testing.plain import PlainTraining
from torrential.trainer.context import RoleContext
from torrential.trainer.server_plan import ServerPlan
from torrential.trainer.snapshot import Snapshot, load_flat
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

    def __init__(self, job: Job, linear: bool, pipelined: PipelineAudit | None = None) -> None:
        """`linear`: parameters are sums of what was pushed; `pipelined`: what is looked at in a run of pipelines."""
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
        self._plain: PlainTraining | None = None
        self._pipelined = pipelined
        if needs_servers(job.strategy):
            plan = ServerPlan(job.task, job.config, job.strategy)
            self._consistency, self._shares = plan.consistency, plan.shares
            self._ledger = Ledger(plan.initial().parameters, plan.consistency, self._complain)
        else:
            self._plain = PlainTraining(job, self._complain)

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

    def snapshot(self, snapshot: Snapshot, flat: Mapping[str, Tensor], assembled: dict[str, Tensor]) -> None:
        """What a checkpoint holds. With servers it is not looked at where letters are lost, for marks count on those
        before them (server/copies.py), nor where the first few pushes make a step: these may be others on another
        range."""
        if self._pipelined is not None:
            self._pipelined.saved(snapshot, assembled)
        if self._plain is not None:
            self._plain.saved(snapshot, flat, assembled)
        if self._job.strategy.name == Hogwild.name:
            saved = self._job.task.model()
            load_flat(saved, plan(saved, 1), flat)
            self._check_falling(f"the checkpoint at {snapshot.step}", saved, snapshot.step)
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
            self._check_members(finished)
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
            workers = {rank: worker for rank, worker in self._roles.items() if isinstance(worker, RoleContext)}
            if self._pipelined is not None:
                self.lost = self._pipelined.lost(workers) or self.lost
            elif all(worker.applied < 0 for worker in workers.values()):
                self.lost = "all workers that had parameters"
        elif address < SERVERS:
            self._give_up(address)

    def _give_up(self, worker: int) -> None:
        """Servers forget a worker that died, and the others of its replica with it."""
        assert self._ledger is not None
        for fellow in self._shares.replica(worker):
            self._executing.pop(fellow, None)
            self._ledger.died(fellow)

    def _find_losses(self) -> None:
        """Whether something is gone that the run cannot go on without."""
        for r in self._table():
            if not any(self._holds(member, r) for member in r.chain):
                self.lost = f"parameters {r.start} to {r.stop}"
        workers = [address for address in self._hub.mails if address < SERVERS]
        if not workers:
            self.lost = "all workers"
        elif self._ledger is not None and not self.lost.startswith("parameters"):
            self.lost = "" if self._shares.leaders(workers) else "a worker of every replica"

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
        turns = getattr(self._job.strategy, "in_turn", False)  # then clocks are places in the turn
        if staleness is None or self._consistency.first is not None or turns:
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
        if self._pipelined is not None and not self.lost:
            self._wrong += self._pipelined.stepped(rank, worker)
        parameters = worker.replica.parameters
        assert parameters is not None
        common = parameters.flat() | worker.state.tensors("everybody")
        counts = [name for name in common if name.endswith("/updates")]  # a worker may have no samples in a round
        mine = b"".join(common[name].numpy().tobytes() for name in sorted(common.keys() - counts))
        members = self._parameters.setdefault(step, {})
        for other, theirs in members.items():
            if theirs != mine:
                self._complain(f"after step {step} workers {rank} and {other} have different parameters, or states")
        members[rank] = mine
        if step == before + 1:
            self._taken[step] = worker.progress.samples - sum(self._taken.get(s, 0) for s in range(1, step))

    def _check_falling(self, what: str, model: nn.Module, updates: int) -> None:
        off = misplaced(model, self._job.config.lr * updates)
        if off > TOLERANCE:
            self._complain(f"after {updates} updates {what} is off by {off} of where these lead")

    def _check_members(self, finished: bool) -> None:
        workers = {w.comm.rank: w for w in self._roles.values() if isinstance(w, RoleContext)}
        places = {f"worker {rank}": (w.step, w.progress.samples) for rank, w in workers.items()}
        assert self._plain is not None
        self._wrong += filter(None, [self._plain.wrong_end(places, finished)])
        if self._job.strategy.name == Hogwild.name:
            for rank, worker in workers.items():
                self._check_falling(f"worker {rank}", worker.replica.model, worker.step)
        self.raise_violation()
        if self._pipelined is not None and self._pipelined.normed:
            self._wrong += self._pipelined.objections()
        elif self._takes_plain_steps():
            whole = {rank: w.replica.model for rank, w in workers.items() if self._pipelined is None}
            self._plain.check_parameters(self._taken, whole)

    def _takes_plain_steps(self) -> bool:
        strategy = self._job.strategy
        # Momentum that is reset is another; one that is each worker's own has a share in steps without samples there.
        apart = getattr(strategy, "inner", "average") != "average" and not self._linear
        return (
            strategy.name not in ("diloco", "streaming", "fedavg", "hogwild")
            and getattr(strategy, "period", 1) == 1
            and not apart
        )

    # -- servers --------------------------------------------------------------------------------------------------
    def _check_servers(self, finished: bool) -> None:
        assert self._ledger is not None
        config, table = self._job.config, self._table()
        there = [address for address in self._roles if address < SERVERS]
        for worker in there:
            if not set(there).issuperset(self._shares.replica(worker)):
                self._give_up(worker)  # what it has pushed since it was alone was answered by nobody
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
