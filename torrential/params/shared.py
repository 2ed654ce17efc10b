"""One copy of the parameters in shared memory; each member sums, updates and answers for its own slice.

An all-reduce is a reduce-scatter and an all-gather. Here the optimizer stands between the two, so that every element
is updated once instead of once per worker, and the gather is free because all look at the same memory. (Slicing the
update: Xu et al. 2020, "Automatic cross-replica sharding of weight update"; Rajbhandari et al. 2020, ZeRO stage 1.)

    backward ──► my slice of the summed gradient, in shared memory
    ballot   ──► everyone's slice is summed: the step is decided        (before: no parameter has changed)
    apply    ──► each member updates its slice, unit by unit, with a journal
    wait     ──► all slices are updated: the next forward may read them

A step is all or nothing. A member that dies before the decision takes the step with it. After it, the survivors
finish what it left: its summed gradient is in shared memory, its journal says which unit it was in, and the undo copy
holds what that unit was before.

    journal = 2k      units below k are done, none is torn
    journal = 2k + 1  units below k are done, unit k may be torn, its undo copy is whole
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torrential.comm.protocol import Agreement, Comm, Handle, Part
from torrential.comm.shared import MAX_RANKS
from torrential.optim.rates import Rates
from torrential.optimizers import OptimizerSpec
from torrential.params.base import Finished, Update, counts_steps, dtype_name, flat_gradient, gradients, state_keys
from torrential.params.layout import Bucket, Layout, Piece

UNIT = 1 << 18  # elements updated between two entries in the journal


@dataclass
class Unit:
    """Pieces of one dtype that are updated together, with their own optimizer over the common state."""

    pieces: list[Piece]
    parameters: list[Tensor]  # views of the common vector
    states: list[list[Tensor]]  # per piece, views of the common state
    optimizer: torch.optim.Optimizer
    rates: Rates

    def contents(self) -> list[Tensor]:
        return [t for p, s in zip(self.parameters, self.states, strict=True) for t in (p, *s)]

    def step(self, update: Update, summed: list[Tensor | None]) -> None:
        self.rates.set(update.lr)
        for parameter, grad in zip(self.parameters, summed, strict=True):
            parameter.grad = grad if grad is None or update.scale == 1.0 else grad * update.scale
        self.optimizer.step()
        self.rates.check()
        for parameter in self.parameters:
            parameter.grad = None


class SharedParameters:
    private = own = False

    def __init__(self, comm: Comm, model: nn.Module, layout: Layout, spec: OptimizerSpec) -> None:
        self.comm, self.layout, self.spec = comm, layout, spec
        self.counts = [0] * len(layout.entries)
        self._parameters = gradients(model, layout)
        self._vectors: dict[torch.dtype, Tensor] = {}
        self._states: dict[torch.dtype, dict[str, Tensor]] = {}
        self._summed: dict[torch.dtype, Tensor] = {}
        self._initial: dict[str, float] = {}
        self._counted = counts_steps(spec)
        for dtype, numel in layout.sizes.items():
            name = dtype_name(dtype)
            keys = state_keys(spec, dtype)
            assert keys is not None
            self._vectors[dtype] = comm.buffer(f"parameters/{name}", numel, dtype, common=True)
            self._states[dtype] = {k: comm.buffer(f"{k}/{name}", numel, dtype, common=True) for k in keys}
            self._summed[dtype] = comm.buffer(f"gradients/{name}", numel, dtype)
            self._initial |= keys
        journal = comm.buffer("journal", MAX_RANKS * 2, torch.int64, common=True)
        self._journal = journal.view(-1, 2).numpy()  # by rank: steps done, place in the step after
        self._members: tuple[int, ...] = ()
        self._units: list[Unit] = []
        self._last: Update | None = None
        self._steps = 0
        self._others_may_update = False

    # -- a step -------------------------------------------------------------------------------------------------
    def reduce(self, bucket: Bucket) -> Handle:
        if len(self._members) == 1:
            return Finished()
        parts = [
            Part(e.start - bucket.start, e.stop - bucket.start, flat_gradient(self._parameters[e.index]))
            for e in bucket.entries
        ]
        return self.comm.reduce_scatter(self._summed[bucket.dtype][bucket.start : bucket.stop], parts)

    def _gradient(self, piece: Piece, summed: dict[torch.dtype, Tensor]) -> Tensor:
        if len(self._members) == 1:  # nothing was summed: it is where autograd left it
            alone = flat_gradient(self._parameters[piece.entry.index])
            assert alone is not None
            return alone[piece.start - piece.entry.start : piece.stop - piece.entry.start]
        return summed[piece.entry.dtype][piece.start : piece.stop]

    def square_norm(self) -> float:
        mine = self.layout.pieces(self._members.index(self.comm.rank), len(self._members))
        present = (p for p in mine if len(self._members) > 1 or self._parameters[p.entry.index].grad is not None)
        norms = (torch.linalg.vector_norm(self._gradient(p, self._summed), dtype=torch.float64) for p in present)
        return sum(float(n) ** 2 for n in norms)

    def apply(self, update: Update) -> None:
        self._last = update
        self._steps += 1
        self._run(self.comm.rank, self._units, update, self._summed)
        for index, used in enumerate(update.used):
            self.counts[index] += used
        self._others_may_update = True

    def _run(self, rank: int, units: list[Unit], update: Update, summed: dict[torch.dtype, Tensor]) -> None:
        """Update the slice of `rank`, from the unit at which its journal says it stopped."""
        steps, place = (int(v) for v in self._journal[rank])
        if steps >= self._steps:
            return  # another survivor has finished it before
        alone = len(self._members) == 1
        first, torn = divmod(place, 2)
        if torn:
            for tensor, old in zip(units[first].contents(), self._undo(rank, units[first]), strict=True):
                tensor.copy_(old)
        for number in range(first, len(units)):
            unit = units[number]
            if not alone:  # with nobody to finish it, a torn step is lost with the run
                for tensor, copy in zip(unit.contents(), self._undo(rank, unit), strict=True):
                    copy.copy_(tensor)
                self._journal[rank, 1] = 2 * number + 1
            used = [update.used[p.entry.index] for p in unit.pieces]
            unit.step(
                update, [self._gradient(p, summed) if u else None for p, u in zip(unit.pieces, used, strict=True)]
            )
            if not alone:
                self._journal[rank, 1] = 2 * number + 2
        self._journal[rank, 0] = self._steps
        self._journal[rank, 1] = 0

    def _undo(self, rank: int, unit: Unit) -> list[Tensor]:
        """The memory that keeps the old contents of a unit while it is being updated."""
        dtype = unit.parameters[0].dtype
        copies = 1 + len(self._states[dtype])
        store = self.comm.buffer(f"undo/{dtype_name(dtype)}", copies * UNIT, dtype, rank=rank)
        views, at = [], 0
        for tensor in unit.contents():
            views.append(store[at : at + tensor.numel()])
            at += tensor.numel()
        return views

    def wait_for_everybody(self) -> None:
        if self._others_may_update and len(self._members) > 1:
            self.comm.barrier().wait()
        self._others_may_update = False

    # -- members come and go ------------------------------------------------------------------------------------
    def regroup(self, agreement: Agreement) -> None:
        if self.comm.rank == agreement.source:
            if self._members and self._last is not None:
                self._finish_for_the_dead(self._members, self._last)
            elif not self._members and agreement.applied < 0:
                self._fill_from_model()
            for rank in agreement.members:
                self._journal[rank] = self._steps, 0
        self.comm.barrier().wait()
        self._steps = int(self._journal[agreement.source, 0])
        for entry, parameter in zip(self.layout.entries, self._parameters, strict=True):
            parameter.data = entry.view(self._vectors[entry.dtype])
        self._members = agreement.members
        self._others_may_update = False
        self._last = None

    def rebuild(self) -> None:
        """Make the optimizers of this member's slice anew, once `counts` is known."""
        self._units = self._cut(self.comm.rank, self._members, self.counts)

    def _finish_for_the_dead(self, members: tuple[int, ...], update: Update) -> None:
        before = [c - u for c, u in zip(self.counts, update.used, strict=True)]
        for rank in members:
            if int(self._journal[rank, 0]) < self._steps:
                summed = {
                    d: self.comm.buffer(f"gradients/{dtype_name(d)}", n, d, rank=rank)
                    for d, n in self.layout.sizes.items()
                }
                self._run(rank, self._cut(rank, members, before), update, summed)

    def _fill_from_model(self) -> None:
        for entry, parameter in zip(self.layout.entries, self._parameters, strict=True):
            entry.view(self._vectors[entry.dtype]).copy_(parameter.detach())
        for states in self._states.values():
            for key, vector in states.items():
                vector.fill_(self._initial[key])

    def _cut(self, rank: int, members: tuple[int, ...], counts: list[int]) -> list[Unit]:
        groups: list[list[Piece]] = []
        filled = 0
        limit = UNIT if len(members) > 1 else 1 << 62
        for piece in self.layout.pieces(members.index(rank), len(members)):
            for start in range(piece.start, piece.stop, limit):
                part = Piece(piece.entry, start, min(piece.stop, start + limit))
                size = part.stop - part.start
                if not groups or filled + size > limit or groups[-1][0].entry.dtype != piece.entry.dtype:
                    groups.append([])
                    filled = 0
                groups[-1].append(part)
                filled += size
        return [self._unit(pieces, counts) for pieces in groups]

    def _unit(self, pieces: list[Piece], counts: list[int]) -> Unit:
        dtype = pieces[0].entry.dtype
        parameters = [self._vectors[dtype][p.start : p.stop] for p in pieces]
        states = [[v[p.start : p.stop] for v in self._states[dtype].values()] for p in pieces]
        optimizer = self.spec.build(parameters, names=[p.entry.name for p in pieces])
        for piece, parameter, views in zip(pieces, parameters, states, strict=True):
            optimizer.state[parameter] = dict(zip(self._states[dtype], views, strict=True))
            if self._counted:
                optimizer.state[parameter]["step"] = torch.tensor(float(counts[piece.entry.index]))
        return Unit(pieces, parameters, states, optimizer, Rates(optimizer, self.spec))

    # -- snapshots ----------------------------------------------------------------------------------------------
    def flat(self) -> dict[str, Tensor]:
        named = {dtype_name(d): v for d, v in self._vectors.items()}
        for dtype, states in self._states.items():
            named |= {f"{dtype_name(dtype)}/{key}": vector for key, vector in states.items()}
        return named

    def extras(self) -> dict[str, Tensor]:
        if not self._counted:
            return {}
        return {f"{e.name}/step": torch.tensor(float(self.counts[e.index])) for e in self.layout.entries}

    def load(self, flat: Mapping[str, Tensor], extras: Mapping[str, Tensor]) -> None:
        for name, vector in self.flat().items():
            vector.copy_(flat[name])
