"""When a role gives a snapshot to the observer, and what is in it."""

from __future__ import annotations

from collections.abc import Callable

from torrential.comm.protocol import Comm
from torrential.splits.slices import read_name
from torrential.trainer.data import TrainingData
from torrential.trainer.progress import TrainingProgress
from torrential.trainer.replica import ModelReplica
from torrential.trainer.saving import Saving
from torrential.trainer.snapshot import Outlet, Snapshot
from torrential.trainer.state import NamedStates


class Snapshots:
    """The snapshots of one role: its own states, and all others if it is the first of the members."""

    def __init__(
        self,
        comm: Comm,
        outlet: Outlet,
        data: TrainingData,
        replica: Callable[[], ModelReplica],
        state: NamedStates,
        progress: TrainingProgress,
        dry: bool,
    ) -> None:
        self._comm, self._outlet, self._data, self._replica = comm, outlet, data, replica
        self._state, self._progress, self._dry = state, progress, dry
        self.saving: Saving | None = None  # where servers keep the parameters
        self._given = 0  # the last step whose snapshot this role has given

    def resumed(self) -> None:
        self._given = -1 if self._progress.finished() else self._progress.step

    def members_changed(self, generation: int) -> None:
        if generation > 1:
            self.give_again()  # the one who was to give it may be gone

    def give_again(self) -> None:
        """The newest snapshot is given once more when it is due, as the last one, say."""
        self._given = min(self._given, self._progress.step - 1)

    def give_when_due(self, alone: bool = False) -> None:
        """Give a snapshot if one is due. `alone`: no other role has a part in it."""
        progress = self._progress
        if self._dry or self._given >= progress.step or not progress.snapshot_due():
            return
        self._given = progress.step
        if self._state.some_are_own:
            self._outlet.own_states(progress.step, self._state.tensors("own"))
        if alone or self._comm.rank == self._comm.members[0]:
            self._give([self._comm.rank] if alone else list(self._comm.members))

    def _give(self, members: list[int]) -> None:
        replica = self._replica()
        if self.saving is not None:
            return self.saving.at_once(self._snapshot(members, {}))
        parameters = replica.parameters
        assert parameters is not None, "say where parameters live before a step is concluded"
        snapshot = self._snapshot(members, {e.name: parameters.counts[e.index] for e in parameters.layout.entries})
        extras = {f"extra/{n}": t for n, t in parameters.extras().items()}
        rest = {f"rest/{n}": t for n, t in (replica.frozen() | replica.buffers()).items() if read_name(n)[1] is None}
        states = {f"state/{n}": t for n, t in self._state.tensors("everybody").items()}
        self._outlet.snapshot(snapshot, parameters.flat(), extras | rest | states)

    def _snapshot(self, members: list[int], counts: dict[str, int]) -> Snapshot:
        progress = self._progress
        return Snapshot(
            step=progress.step,
            epoch=self._data.deal.epoch,
            cursor=self._data.deal.cursor,
            samples=progress.samples,
            time=progress.time,
            members=members,
            counts=counts,
            final=progress.finished(),
            parts=self._state.some_are_own,
        )
