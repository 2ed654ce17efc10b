"""The context of a role's program: its parts, each made when it is first asked for."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch

from torrential.checkpoint import Checkpoint
from torrential.comm.protocol import COORDINATORS, Comm
from torrential.config import RunConfig
from torrential.data.deal import order_of
from torrential.data.loaders import Loaders
from torrential.errors import Regrouped
from torrential.optim.schedule import Schedule, schedule_of
from torrential.params.base import CommonParameters
from torrential.server.client import Client, Fellows
from torrential.server.optimizer import state_names
from torrential.strategies.base import Strategy, servers_of
from torrential.strategies.context import Context, Decision, Vote
from torrential.task import Task
from torrential.trainer.ahead import LookAhead
from torrential.trainer.data import TrainingData
from torrential.trainer.handed import WholeModel
from torrential.trainer.own_parts import OwnParts
from torrential.trainer.progress import TrainingProgress
from torrential.trainer.replica import ModelReplica
from torrential.trainer.rounds import BetweenSteps, Rounds
from torrential.trainer.saving import Saving
from torrential.trainer.snapshot import Outlet
from torrential.trainer.snapshots import Snapshots
from torrential.trainer.staged import StagedReplica
from torrential.trainer.state import NamedStates


def _untimed(parameters: CommonParameters) -> CommonParameters:
    return parameters


class RoleContext:
    """Implements strategies.context.Context."""

    def __init__(
        self,
        task: Task,
        config: RunConfig,
        strategy: Strategy,
        comm: Comm,
        outlet: Outlet,
        device: torch.device,
        reduce_device: torch.device | None = None,
        checkpoint: Checkpoint | None = None,
        life: int = 0,
        timed: Callable[[CommonParameters], CommonParameters] = _untimed,
        loaders: Loaders | None = None,
        handed: Callable[[], WholeModel] | None = None,
    ) -> None:
        """`checkpoint`: what the run goes on from; `life`: how many with this address have been there before;
        `loaders`: processes that read this role's batches; `handed`: gives the model where it was built already."""
        self.task, self.config, self.strategy, self.comm, self.outlet = task, config, strategy, comm, outlet
        self._device, self._dry = device, device.type == "meta"
        self._reduce_device = torch.device("cpu") if reduce_device is None else reduce_device
        self._timed, self._loaders, self._handed = timed, loaders, handed
        alone = comm.address >= COORDINATORS
        schedule = schedule_of(config, strategy.samples_per_update(config.workers, config.batch_size), task.schedule)
        self.servers = servers_of(strategy, config.workers, max(1, config.servers))
        self._first = checkpoint if self.servers is not None or alone or not life else None
        self._fellows = range(0) if alone else strategy.fellows(comm.rank, config.workers)
        saved = None if self._first is None else self._first.workers
        replaces = life > 0 and not alone
        self.state = NamedStates(saved, str(comm.address), self._fellows, self._begun, replaces)
        self.data = self._make_data(schedule)
        self.progress = self._make_progress(schedule, late=life > 0)
        self.snapshots = Snapshots(comm, outlet, self.data, lambda: self.replica, self.state, self.progress, self._dry)
        if alone:
            self._go_on_alone()
        roles = strategy.roles(config.workers, config.servers)
        self._coordinated = any(role.name == "coordinator" for role in roles)  # which then gives the snapshots
        self._redone = any(role.name == "worker" and role.death == "regroup" for role in roles)
        self._rounds: Rounds | None = None

    # -- parts that a script's own loop has others for (loop/context.py) -----------------------------------------
    replica_kind: type[ModelReplica] = ModelReplica
    between: BetweenSteps | None = None  # what happens between two steps, where a script has a say in it

    def _make_data(self, schedule: Schedule) -> TrainingData:
        order = order_of(self.task, self.config)
        data = TrainingData(self.config, self.comm, schedule, lambda: self.params, order)
        if self._loaders is not None:
            data.ahead = LookAhead(self._loaders, self.config, order, self.servers)
        return data

    def _make_progress(self, schedule: Schedule, late: bool) -> TrainingProgress:
        return TrainingProgress(self.config, self.comm, self.outlet, self.data, schedule, self._first, late)

    @cached_property
    def replica(self) -> ModelReplica:
        staged = self.servers is not None and self.servers.stages > 1 and self.comm.address < COORDINATORS
        replica = (StagedReplica if staged else self.replica_kind)(
            self.task,
            self.config,
            self.strategy,
            self.comm,
            self.state,
            self.progress,
            self._device,
            self._reduce_device,
            self.comm.address < COORDINATORS,
            self._timed,
            self._first,
            self._loaders,
            self._handed,
        )
        if isinstance(replica, StagedReplica):
            self.data.replica, self.data.takers = replica, replica.shares.leaders
            self.progress.lead(replica.partition.leads, replica.shares.leaders)
        return replica

    @property
    def step(self) -> int:
        """Steps taken so far, as far as this role knows."""
        return self.progress.step

    @property
    def applied(self) -> int:
        """Steps taken so far in rounds; -1 before this member has agreed on anything with the others."""
        return -1 if self._rounds is None else self._rounds.applied

    def _begun(self) -> bool:
        """Whether this role has begun with its first step."""
        return self._rounds is not None or self.progress.begun

    def _go_on_alone(self) -> None:
        """A coordinator gives its snapshots alone, and knows by itself where it is in the data."""
        self.progress.give_snapshot = lambda: self.snapshots.give_when_due(alone=True)
        if self._first is not None:
            self.data.place(self._first.epoch, self._first.cursor)
            self.snapshots.resumed()

    # -- with servers -------------------------------------------------------------------------------------------
    @cached_property
    def params(self) -> Client:
        assert self.servers is not None, f"{self.strategy.name} declares no servers"
        replica = self.replica
        client = self._client(replica.partition if isinstance(replica, StagedReplica) else None)
        if not self._dry:
            spec = replica.server_spec()
            states = [*state_names(replica.whole_layout, spec), *self.servers.vectors]
            parts = self._own_parts
            saving = Saving(self.comm, client, self.outlet, replica, states, self.state, parts, self.config.workers)
            if self.comm.address >= COORDINATORS:
                self.snapshots.saving = saving
            elif not self._coordinated:
                self.progress.saving = saving
                if parts is not None:
                    self.data.begins = parts.begins
        return client

    def _client(self, fellows: Fellows | None) -> Client:
        ((dtype, numel),) = self.replica.whole_layout.sizes.items()
        compressor = self.replica.compressed_pushes()
        return Client(
            self.comm,
            numel,
            dtype,
            timeout=self.config.settings.timeout,
            resend=self.comm.resend,
            overdue=self.comm.suspect,
            fellows=fellows,
            compressor=compressor,
            parts=self._own_parts,
        )

    @cached_property
    def _own_parts(self) -> OwnParts | None:
        """What this worker adds of its own to checkpoints of the servers."""
        assert self.servers is not None
        if self._dry or self._coordinated:
            return None
        return OwnParts(self.outlet, self.state, self.servers.consistency.aggregates)

    def as_replica(self, program: Callable[[Context], None]) -> None:
        replica = self.replica
        assert isinstance(replica, StagedReplica), f"{self.strategy.name} declares no stages"
        while replica.partition.meet(lambda: self._client(None)):
            vars(self).pop("params", None)  # servers have forgotten what came before
            replica.begin()
            try:
                return program(self)
            except Regrouped:
                self.progress.begin_again()
                if self.data.ahead is not None:
                    self.data.ahead.forget()
        self.progress.end_served()
        self.comm.leave()

    # -- with the other members ---------------------------------------------------------------------------------
    def rounds(self, propose: Callable[[], Vote], conclude: Callable[[Decision], None]) -> None:
        self._rounds = Rounds(
            self.comm,
            self.data,
            self.replica,
            self.state,
            self.progress,
            self.snapshots,
            self._first,
            self._dry,
            self._redone,
            self._fellows,
            self.between,
        )
        self._rounds.run(propose, conclude)

    def leave(self) -> None:
        saving = self.progress.saving
        if saving is None and (self.servers is None or self._coordinated):
            if self._coordinated and self.comm.address < COORDINATORS:
                self.progress.left()
            return self.comm.leave()
        if saving is not None:
            saving.give_up()  # the last one follows
        if "params" in vars(self):
            self.params.wait()
            if self._own_parts is not None:
                self._own_parts.last()
        if self.data.replica is not None:
            self.data.replica.partition.close()
        self.progress.end_served()
        self.comm.leave(None if saving is None else saving.last)
