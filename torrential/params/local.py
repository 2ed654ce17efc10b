"""Parameters and an optimizer of one role alone: no other role has a part in its steps.

The strategy decides what members do with them (an average, a centre, nothing). The optimizer's state is this worker's
own: it is saved for each of them, and put back when a round is given up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from torrential.comm.protocol import Agreement
from torrential.errors import RunFailed
from torrential.optim.outside import Outside
from torrential.optim.rates import Rates
from torrential.optimizers import OptimizerSpec
from torrential.params.base import StepGuard, computing_device, dtype_name, is_elementwise
from torrential.params.layout import Layout
from torrential.params.optimizer_state import begin_momentum, restored, states_of
from torrential.params.whole import form_of, in_order, lies_in
from torrential.splits.slices import read_name

_UPDATES = "updates"


class LocalParameters:
    """Implements params.base.Parameters."""

    private = True

    def __init__(
        self,
        parameters: list[nn.Parameter],
        layout: Layout,
        spec: OptimizerSpec,
        device: torch.device,
        clip_norm: float | None,
        own: bool,
        guard: StepGuard | None = None,
    ) -> None:
        """`parameters` stand in the order of the layout. `own`: their values are this worker's, too. `guard`: knows of
        steps that are left out."""
        self._guard = guard
        self.layout, self.spec, self.own = layout, spec, own
        self.counts = [0] * len(layout.entries)
        self._parameters, self.clip_norm = parameters, clip_norm
        self._form = None if is_elementwise(spec) else form_of(spec, layout, computing_device(device))
        ordered = in_order(layout)
        names = [read_name(e.name)[0] for e in ordered]
        self._optimizer = spec.build([parameters[e.index] for e in ordered], device.type, names)
        self._rates = Rates(self._optimizer, spec)
        watched = self._form is not None and self._form.unsaved is None
        self._outside = Outside(self._optimizer) if watched else None
        begin_momentum(spec, self._optimizer)
        self._put_off: Callable[[], None] | None = None

    @property
    def elementwise(self) -> bool:
        """Whether parameters may be stepped apart from one another."""
        return self._form is None

    def put_off(self, work: Callable[[], None]) -> None:
        """Put off a part of the step that is being concluded: `catch_up` takes it, at the latest before values are
        read."""
        self._put_off = work

    def catch_up(self) -> None:
        """Take the part of the last step that was put off, if it was not taken yet."""
        if (work := self._put_off) is not None:
            self._put_off = None
            work()

    def step(self, rate: float, gradient: Tensor | None = None) -> None:
        """Take a step by the gradients that backward has left, or by a flat one."""
        if gradient is None and self.left_out:
            return
        if gradient is not None:
            for entry, parameter in zip(self.layout.entries, self._parameters, strict=True):
                parameter.grad = entry.view(gradient).to(parameter.device)
        for entry, parameter in zip(self.layout.entries, self._parameters, strict=True):
            self.counts[entry.index] += parameter.grad is not None
        if self.clip_norm is not None:
            nn.utils.clip_grad_norm_(self._parameters, self.clip_norm)
        self._rates.set(rate)
        places = [] if self._form is None else [parameter.data for parameter in self._parameters]
        self._optimizer.step()
        self._rates.check()
        for parameter, place in zip(self._parameters, places, strict=bool(places)):
            if not lies_in(parameter, place):
                self._move_back(parameter, place)

    @property
    def left_out(self) -> bool:
        """Whether the gradients that backward has left are not finite, so that the step is left out."""
        return self._guard is not None and self._guard.overflowed

    def begin_anew(self) -> None:
        """Clear the optimizer's state, as if it had not taken a step."""
        self._optimizer.state.clear()
        begin_momentum(self.spec, self._optimizer)

    def _move_back(self, parameter: nn.Parameter, place: Tensor) -> None:
        """Put a parameter that the optimizer has given new memory back into the old, of which the program may have a
        view; what the optimizer keeps there is moved out of it."""
        state = self._optimizer.state.get(parameter, {})
        for key, value in state.items():
            if torch.is_tensor(value) and value.data_ptr() == place.data_ptr():
                state[key] = value.clone()
        parameter.data = place.copy_(parameter.data)

    # -- members come and go: nothing is shared -----------------------------------------------------------------
    def wait_for_everybody(self) -> None:
        """Return at once: every step is complete where it was taken."""

    def regroup(self, agreement: Agreement) -> None:
        """Do nothing: members that are behind receive the parameters from the source."""

    def rebuild(self) -> None:
        """Keep the optimizer as it is."""

    # -- what is saved ------------------------------------------------------------------------------------------
    def flat(self) -> dict[str, Tensor]:
        """The parameters as flat vectors by dtype; nothing where they are each worker's own."""
        return {} if self.own else self._vectors()

    def _vectors(self) -> dict[str, Tensor]:
        named = {dtype_name(dtype): torch.zeros(numel, dtype=dtype) for dtype, numel in self.layout.sizes.items()}
        for entry, parameter in zip(self.layout.entries, self._parameters, strict=True):
            entry.view(named[dtype_name(entry.dtype)]).copy_(parameter.detach())
        return named

    def extras(self) -> dict[str, Tensor]:
        return {}

    def load(self, flat: Mapping[str, Tensor], extras: Mapping[str, Tensor]) -> None:
        """Copy parameters from a checkpoint. The optimizer's state is each worker's own."""
        if self.own:
            return
        for entry, parameter in zip(self.layout.entries, self._parameters, strict=True):
            parameter.data.copy_(entry.view(flat[dtype_name(entry.dtype)]))

    def values(self) -> dict[str, Tensor]:
        """The parameters by name."""
        self.catch_up()
        return {e.name: p.detach() for e, p in zip(self.layout.entries, self._parameters, strict=True)}

    def load_values(self, values: Mapping[str, Tensor]) -> None:
        self.catch_up()
        for entry, parameter in zip(self.layout.entries, self._parameters, strict=True):
            if entry.name not in values:
                raise RunFailed(f"no worker has the parameter {entry.name} any more, nor a copy of it; resume the run")
            parameter.data.copy_(values[entry.name])

    def optimizer_state(self) -> dict[str, Tensor]:
        """The optimizer's state by "<parameter>/<key>", and how many steps each parameter has seen."""
        self.catch_up()
        if self._outside is not None:
            self._outside.check(self._optimizer)
        names = [entry.name for entry in self.layout.entries]
        states = {
            f"{names[index]}/{key}": value.detach()
            for index, key, value in states_of(self._optimizer, self._parameters)
        }
        return states | {f"{name}/{_UPDATES}": torch.tensor(n) for name, n in zip(names, self.counts, strict=True)}

    def load_optimizer_state(self, states: Mapping[str, Tensor]) -> None:
        """Copy such a state; entries of parameters that this worker does not have are ignored."""
        self.catch_up()
        by_name = {e.name: (e, p) for e, p in zip(self.layout.entries, self._parameters, strict=True)}
        self._optimizer.state.clear()
        for name, tensor in states.items():
            owner, _, key = name.rpartition("/")
            if owner not in by_name:
                continue
            entry, parameter = by_name[owner]
            if key == _UPDATES:
                self.counts[entry.index] = int(tensor)
            else:
                on = parameter.device if tensor.dim() else tensor.device
                self._optimizer.state[parameter][key] = restored(key, tensor.to(on), self._form)
