"""A copy of the parameters with every worker; gradients are summed over all, and every worker takes the same step.

Used where memory is not shared (sockets, GPUs, simulation) and for optimizers that need whole tensors. On a GPU the
gradients meet in pinned host memory, unless each worker has a GPU of its own and NCCL carries them.

A worker that dies takes nothing with it. One that had not heard of a decided step when another died is brought up to
date from one that had.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from torrential.comm.protocol import Agreement, Comm, Handle
from torrential.errors import RunFailed
from torrential.optim.outside import Outside
from torrential.optim.rates import Rates
from torrential.optimizers import OptimizerSpec
from torrential.params.base import (
    Update,
    computing_device,
    dtype_name,
    gradients,
    is_elementwise,
)
from torrential.params.layout import Bucket, Layout, ParameterEntry
from torrential.params.optimizer_state import begin_momentum, restored, states_of
from torrential.params.sums import DenseSums, GradientSums, dense
from torrential.params.whole import DRAWS, form_of, in_order


class ReplicatedParameters:
    private, own = True, False

    def __init__(
        self,
        comm: Comm,
        model: nn.Module,
        layout: Layout,
        spec: OptimizerSpec,
        device: torch.device,
        reduce_device: torch.device,
        sums: GradientSums | None = None,
    ) -> None:
        """`reduce_device`: where gradients are summed; `sums`: how, by default as they are."""
        self.comm, self.layout, self.spec, self.device = comm, layout, spec, device
        self.counts = [0] * len(layout.entries)
        self._parameters = gradients(model, layout)
        ordered = in_order(layout)  # as the model defines them: an optimizer may look at that
        self._optimizer = spec.build(
            [self._parameters[e.index] for e in ordered], device.type, [e.name for e in ordered]
        )
        self._rates = Rates(self._optimizer, spec)
        self._form = None if is_elementwise(spec) else form_of(spec, layout, computing_device(device))
        self._outside = None if self._form is None or self._form.unsaved is not None else Outside(self._optimizer)
        begin_momentum(spec, self._optimizer)
        self.sums = DenseSums(comm, layout, self._parameters, device, reduce_device) if sums is None else sums

    # -- a step -------------------------------------------------------------------------------------------------
    def reduce(self, bucket: Bucket) -> Handle:
        return self.sums.reduce(bucket)

    def square_norm(self) -> float:
        """The squared norm on the first member, 0 on the others: each has the whole gradient, and the parts are added
        up."""
        if self.comm.rank != self.comm.members[0]:
            return 0.0
        return self.sums.square_norm()

    def apply(self, update: Update) -> None:
        for entry, parameter in zip(self.layout.entries, self._parameters, strict=True):
            if not update.used[entry.index]:
                parameter.grad = None
                continue
            self.counts[entry.index] += 1
            summed = self.sums.of(entry)
            if summed is None and parameter.grad is not None and parameter.grad.is_sparse:
                summed = dense(parameter.grad)
            if summed is not None:
                parameter.grad = _as_laid_out(summed, parameter)
            if update.scale != 1.0 and parameter.grad is not None:
                parameter.grad *= update.scale
        self._rates.set(update.lr)
        drawn = None if self._form is None or len(self.comm.members) == 1 else torch.get_rng_state()
        self._optimizer.step()
        self._rates.check()
        if drawn is not None and not torch.equal(drawn, torch.get_rng_state()):
            raise RunFailed(DRAWS.format(name=self.spec.kind.__name__, workers=len(self.comm.members)))
        for parameter in self._parameters:
            parameter.grad = None
        self.sums.commit()

    def wait_for_everybody(self) -> None:
        """Return at once: every worker has taken the step by itself."""

    # -- members come and go ------------------------------------------------------------------------------------
    def regroup(self, agreement: Agreement) -> None:
        """Do nothing: members that are behind receive `tensors` from the source."""

    def rebuild(self) -> None:
        """The optimizer goes on as it is."""

    # -- snapshots ----------------------------------------------------------------------------------------------
    def _states(self) -> Iterator[tuple[int, str, Tensor]]:
        return states_of(self._optimizer, self._parameters)

    def flat(self) -> dict[str, Tensor]:
        if self._outside is not None:
            self._outside.check(self._optimizer)
        named: dict[str, Tensor] = {}
        parameters = ((i, "", p.detach()) for i, p in enumerate(self._parameters))
        for index, key, tensor in itertools.chain(parameters, self._states()):
            entry = self.layout.entries[index]
            if _elementwise(key, tensor, entry):
                name = f"{dtype_name(entry.dtype)}/{key}".rstrip("/")
                vector = named.setdefault(name, torch.zeros(self.layout.sizes[entry.dtype], dtype=tensor.dtype))
                entry.view(vector).copy_(tensor)
        return named

    def extras(self) -> dict[str, Tensor]:
        entries = self.layout.entries
        odd = (s for s in self._states() if not _elementwise(s[1], s[2], entries[s[0]]))
        return {f"{entries[index].name}/{key}": value.detach().cpu() for index, key, value in odd}

    def load(self, flat: Mapping[str, Tensor], extras: Mapping[str, Tensor]) -> None:
        form = self._form
        if form is not None and form.unsaved is not None and any(self.counts):
            raise RunFailed(
                f"{self.spec.kind.__name__} keeps {form.unsaved}, which no checkpoint holds, so it cannot go on from "
                "where it was; keep tensors and numbers in self.state[parameter], or start another run"
            )
        by_name = {e.name: p for e, p in zip(self.layout.entries, self._parameters, strict=True)}
        for name, vector in flat.items():
            dtype, _, key = name.partition("/")
            for entry in self.layout.entries:
                if dtype_name(entry.dtype) != dtype or (key and not self.counts[entry.index]):
                    continue
                if key and form is not None and key not in form.elements[entry.index]:
                    continue  # other tensors have that
                parameter = by_name[entry.name]
                if key:
                    state = torch.empty_like(parameter, dtype=vector.dtype, requires_grad=False)
                    self._optimizer.state[parameter][key] = state.copy_(entry.view(vector))
                else:
                    parameter.data.copy_(entry.view(vector))
        for name, tensor in extras.items():
            named, _, key = name.rpartition("/")
            self._optimizer.state[by_name[named]][key] = restored(key, tensor, form)


def _as_laid_out(tensor: Tensor, parameter: nn.Parameter) -> Tensor:
    """In memory, too: torch's fused steps take element by element as they lie there (as in channels_last, or .t())."""
    if tensor.stride() == parameter.stride():
        return tensor
    return torch.empty_like(parameter, dtype=tensor.dtype, requires_grad=False).copy_(tensor)


def _elementwise(key: str, tensor: Tensor, entry: ParameterEntry) -> bool:
    """Whether a piece of optimizer state has one value per element of its parameter."""
    return tensor.shape == entry.shape and key != "step"
