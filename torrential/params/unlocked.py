"""One copy of the parameters in shared memory, which all members change without locks (Niu et al. 2011).

    begin    every member copies its slice into an undo vector, then all meet: from here on every member may write
    step     x[places] -= rate * gradient[places]       read, subtracted and written back, without a lock
    conclude what was written stands

Of two members that write an element at the same time one loses its update: adding to memory is not atomic here. With
`count_lost` a second vector counts the updates of every element, written in the same way, and loses as many.

A round that is given up is put back from the undo vector, by one member. That is whole as soon as every member has
noted that its slice is there; as long as one member has not, no member has begun to write. There are two such vectors,
for rounds in turn: a member that has seen all votes may copy its slice for the next round, and die, before others have
seen them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from torrential.comm.protocol import Agreement, Comm, slices
from torrential.optimizers import OptimizerSpec
from torrential.params.base import StepGuard, dtype_name
from torrential.params.layout import Layout
from torrential.params.local import LocalParameters

_ROUND, _WRITTEN, _AGREED = 0, 1, 2  # places in a member's row of the journal


class UnlockedParameters(LocalParameters):
    """Implements params.base.Parameters. The optimizer's state is each member's own."""

    private = False

    def __init__(
        self,
        comm: Comm,
        parameters: list[nn.Parameter],
        layout: Layout,
        spec: OptimizerSpec,
        device: torch.device,
        clip_norm: float | None,
        workers: int,
        count_lost: bool,
        guard: StepGuard | None = None,
    ) -> None:
        super().__init__(parameters, layout, spec, device, clip_norm, own=False, guard=guard)
        self._comm = comm
        self._vectors_of = {d: self._common("parameters", n, d) for d, n in layout.sizes.items()}
        self._undo = [{d: self._common(f"undo{k}", n, d) for d, n in layout.sizes.items()} for k in range(2)]
        self._counts = {d: self._common("writes", n, torch.int32, d) for d, n in layout.sizes.items() if count_lost}
        journal = comm.buffer("journal", workers * 3, torch.int64, common=True)
        self._journal = journal.view(
            -1, 3
        ).numpy()  # by rank: rounds begun, updates written, rounds it said all have begun
        self._plain = _is_plain_descent(spec)
        self._members: tuple[int, ...] = ()
        self._rounds, self._open, self._counted_before = 0, False, 0

    def _common(self, what: str, numel: int, dtype: torch.dtype, of: torch.dtype | None = None) -> Tensor:
        return self._comm.buffer(f"{what}/{dtype_name(of or dtype)}", numel, dtype, common=True)

    # -- a round ------------------------------------------------------------------------------------------------
    def begin(self) -> None:
        """Copy this member's slice into the undo vector, and wait until all members have: then all may write."""
        self._open = True
        self._rounds += 1
        for dtype, vector in self._vectors_of.items():
            first, last = slices(vector.numel(), len(self._members))[self._members.index(self._comm.rank)]
            self._undo[self._rounds % 2][dtype][first:last].copy_(vector[first:last])
        self._counted_before = self._count_all()
        self._journal[self._comm.rank, _ROUND] = self._rounds
        self._comm.barrier().wait()

    def written(self) -> int:
        """The updates that all members together have written so far."""
        return int(self._journal[:, _WRITTEN].sum())

    def step(self, rate: float, gradient: Tensor | None = None) -> None:
        """Take a step by the gradients that backward has left; a sparse gradient changes only its own rows."""
        if gradient is None and self.left_out:
            return
        if self._plain and gradient is None and self.clip_norm is None:
            self._descend(float(rate))
        else:
            super().step(rate, gradient)
        self._journal[self._comm.rank, _WRITTEN] += 1

    def _descend(self, rate: float) -> None:
        """Plain gradient descent. torch's own step would sort and join the rows of a sparse gradient first."""
        for entry, parameter in zip(self.layout.entries, self._parameters, strict=True):
            if parameter.grad is None:
                continue
            self.counts[entry.index] += 1
            if (rows := _rows(parameter)) is None:
                parameter.data.add_(parameter.grad, alpha=-rate)
            else:
                target, values = parameter.data, parameter.grad._values()
                if target.numel() == len(target):  # elements, which are quicker to add than rows of one
                    target, values = target.view(-1), values.reshape(-1)
                target.index_add_(0, rows, values, alpha=-rate)

    def count(self) -> int:
        """Count the updates of single elements that the last step has made; returns how many these were."""
        total = 0
        for entry, parameter in zip(self.layout.entries, self._parameters, strict=True):
            if parameter.grad is None:
                continue
            counts = entry.view(self._counts[entry.dtype])
            if (rows := _rows(parameter)) is None:
                counts.add_(1)
                total += counts.numel()
            else:
                ones = torch.ones(1, dtype=torch.int32).expand(len(rows), *counts.shape[1:])
                counts.index_add_(0, rows, ones)
                total += ones.numel()
        return total

    def counted(self) -> int:
        """How many of the updates of single elements that were counted in this round are in memory. To be called when
        no member writes: before the next round begins."""
        return self._count_all() - self._counted_before

    def _count_all(self) -> int:
        return sum(int(counts.sum(dtype=torch.int64)) for counts in self._counts.values())

    def conclude(self) -> None:
        """The round is decided: what was written stands."""
        self._open = False

    # -- members come and go ------------------------------------------------------------------------------------
    def regroup(self, agreement: Agreement) -> None:
        if self._comm.rank == agreement.source:
            if not self._members and agreement.applied < 0:
                for entry, parameter in zip(self.layout.entries, self._parameters, strict=True):
                    entry.view(self._vectors_of[entry.dtype]).copy_(parameter.detach())
            elif self._open and all(int(self._journal[rank, _ROUND]) >= self._rounds for rank in self._members):
                for dtype, vector in self._vectors_of.items():
                    vector.copy_(self._undo[self._rounds % 2][dtype])
            self._journal[list(agreement.members), _ROUND] = self._journal[self._comm.rank, _AGREED] = self._rounds
        self._comm.barrier().wait()
        self._rounds = int(self._journal[agreement.source, _AGREED])  # who is quicker may have begun the next
        for entry, parameter in zip(self.layout.entries, self._parameters, strict=True):
            parameter.data = entry.view(self._vectors_of[entry.dtype])
        self._members, self._open = agreement.members, False

    # -- what is saved ------------------------------------------------------------------------------------------
    def flat(self) -> dict[str, Tensor]:
        return {dtype_name(dtype): vector for dtype, vector in self._vectors_of.items()}

    def load(self, flat: Mapping[str, Tensor], extras: Mapping[str, Tensor]) -> None:
        for name, vector in self.flat().items():
            vector.copy_(flat[name])


def _rows(parameter: nn.Parameter) -> Tensor | None:
    """The rows that a sparse gradient is of; None: it is dense."""
    assert parameter.grad is not None
    return parameter.grad._indices()[0] if parameter.grad.is_sparse else None


def _is_plain_descent(spec: OptimizerSpec) -> bool:
    """Whether a step is no more than the rate times the gradient."""
    kept = {"lr", "fused", "foreach"}
    moved = any(value for options in spec.option_sets() for name, value in options.items() if name not in kept)
    return spec.kind is torch.optim.SGD and not moved and not spec.groups
