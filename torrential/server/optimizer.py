"""torch.optim on a range of a flat vector: parameters and per-element state are views of full-length buffers.

    parameters  |....|aaaa|bb|cccccc|....|      one piece per tensor of the model that meets the range
    exp_avg     |....|aaaa|bb|cccccc|....|      the same pieces of each state
    step             t    t  t                  state without elements: one number for each piece

Only the pages of ranges that a server holds are ever touched, so the rest of a buffer costs nothing, and nothing has to
be copied when a range is cut.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torrential.comm.protocol import Mail
from torrential.errors import BadInput
from torrential.optim.rates import Rates
from torrential.optimizers import OptimizerSpec
from torrential.params.base import counts_steps, is_elementwise, state_keys
from torrential.params.layout import Layout, Piece
from torrential.params.whole import OptimizerTraits, form_of
from torrential.server.messages import Span

MOST_KEPT = 256  # views and optimizers of parts of a range
Scalars = dict[int, dict[str, float]]  # by entry, by name


class Store:
    """A server's memory: full-length registered buffers."""

    def __init__(
        self,
        comm: Mail,
        layout: Layout,
        spec: OptimizerSpec,
        name: str = "server",
        vectors: Mapping[str, float] | None = None,
    ) -> None:
        """`vectors`: what handlers keep beside the parameters, by name, with the value that they begin with."""
        if len(layout.sizes) != 1:
            kinds = ", ".join(str(d).removeprefix("torch.") for d in layout.sizes) or "none"
            raise BadInput(
                f"a parameter server holds parameters of one dtype (the model's: {kinds}); convert the model"
            )
        ((self.dtype, self.numel),) = layout.sizes.items()
        self.layout, self.spec, self._comm, self._name = layout, spec, comm, name
        self.form = _form(layout, spec)
        self.initial, self.counted = _initial(layout, spec, self.form)
        self.parameters = self._buffer("parameters")
        self._vectors = vectors or {}
        if taken := self._vectors.keys() & {"parameters", *self.initial}:
            raise BadInput(f"servers keep {sorted(taken)[0]!r} already; call the strategy's vector something else")
        self.optimizer_states = {name: self._buffer(f"states/{name}") for name in self.initial}
        self.states = self.optimizer_states | {name: self._buffer(f"states/{name}") for name in self._vectors}
        self.initial = {**self.initial, **self._vectors}
        self._views: dict[Span, Tensor] = {}
        self._sum: Tensor | None = None
        self._twin: Store | None = None

    @property
    def sum(self) -> Tensor:
        """The vector in which gradients of several workers are added up."""
        if self._sum is None:
            self._sum = self._buffer("gradients")
        return self._sum

    @property
    def twin(self) -> Store:
        """Room for a copy of everything. Takes no memory before it is used."""
        if self._twin is None:
            self._twin = Store(self._comm, self.layout, self.spec, f"{self._name}/copy", self._vectors)
        return self._twin

    def _buffer(self, name: str) -> Tensor:
        return self._comm.buffer(f"{self._name}/{name}", self.numel, self.dtype)

    def view(self, span: Span) -> Tensor:
        """A view of the parameters in a span, kept because the same parts are read again and again."""
        view = self._views.get(span)
        if view is None:
            if len(self._views) >= MOST_KEPT:
                self._views.clear()
            view = self._views[span] = self.parameters[span[0] : span[1]]
        return view

    def tensors(self, start: int, stop: int) -> list[Tensor]:
        """Parameters, then states by name."""
        return [self.parameters[start:stop], *(vector[start:stop] for vector in self.states.values())]

    def clear(self, start: int, stop: int) -> None:
        self.parameters[start:stop].zero_()
        for name, value in self.initial.items():
            self.states[name][start:stop].fill_(value)


def state_names(layout: Layout, spec: OptimizerSpec) -> list[str]:
    """The names of the optimizer's per-element states, in a store's order."""
    return list(_initial(layout, spec, _form(layout, spec))[0])


def bounds(layout: Layout, spec: OptimizerSpec) -> list[int] | None:
    """The only keys at which the vector may be cut for this optimizer; None: anywhere."""
    form = _form(layout, spec)
    if form is None:
        return None
    return [entry.start for entry in layout.entries] if form.divisible else [0]


def _form(layout: Layout, spec: OptimizerSpec) -> OptimizerTraits | None:
    """The traits of an optimizer that is run on whole tensors (server/whole.py); refuses those that servers cannot
    keep."""
    (dtype,) = layout.sizes
    if dtype.is_complex:
        raise BadInput("servers keep real numbers (the model's parameters: complex); use --strategy allreduce")
    if is_elementwise(spec) or not dtype.is_floating_point:
        return None  # a store of whole numbers has no use for the optimizer
    form = form_of(spec, layout)
    why = form.others
    if form.draws:
        why = "it draws random numbers, which replicas would draw otherwise"
    elif form.unsaved is not None:
        why = f"it keeps {form.unsaved}, which replicas and checkpoints do not get"
    if why is not None:
        raise BadInput(
            f"{spec.kind.__name__} cannot be run on a parameter server: {why}; use another optimizer, or --strategy "
            "allreduce"
        )
    return form


def _initial(layout: Layout, spec: OptimizerSpec, form: OptimizerTraits | None) -> tuple[dict[str, float], bool]:
    """The optimizer's per-element state with its initial values, and whether it counts steps."""
    (dtype,) = layout.sizes
    if form is not None:
        return dict.fromkeys(form.names(), 0.0), False
    keys = state_keys(spec, dtype) if dtype.is_floating_point else {}
    assert keys is not None
    return keys, bool(dtype.is_floating_point) and counts_steps(spec)


@functools.cache
def _bare_step(kind: type[torch.optim.Optimizer]) -> Callable[[torch.optim.Optimizer], Any]:
    """`step` without torch's hooks and marks for its profiler, which cost more than a small step itself."""
    step: Callable[[torch.optim.Optimizer], Any] = inspect.unwrap(kind.step)
    return step


class _Adagrad:
    """What a fused step of Adagrad comes to, less its preparations: those take many times as long as a small step, and
    small steps of Adagrad are what asynchronous servers do all day."""

    def __init__(
        self,
        group: Mapping[str, Any],
        rates: Rates,
        parameters: list[Tensor],
        states: Sequence[Mapping[str, Tensor]],
    ) -> None:
        self._group, self._rates = group, rates
        self._operands = parameters, [s["sum"] for s in states], [s["step"] for s in states]
        self._counts = [step.numpy() for step in self._operands[2]]  # quicker than torch, for one number
        self._options = {name: group[name] for name in ("lr_decay", "weight_decay", "eps", "maximize")}

    def step(self, gradients: Sequence[Tensor | None], lr: float) -> None:
        used = [i for i, gradient in enumerate(gradients) if gradient is not None]
        parameters, sums, steps = self._operands
        if len(used) < len(parameters):
            gradients = [gradients[i] for i in used]
            parameters, sums, steps = ([given[i] for i in used] for given in self._operands)
        if not used:
            return
        for i in used:
            self._counts[i][()] += 1
        self._rates.set(lr)
        lr = self._group["lr"]
        torch._fused_adagrad_(parameters, gradients, sums, steps, lr=lr, **self._options)  # type: ignore[call-overload]


class _Stepper(NamedTuple):
    """An optimizer of some elements of some pieces."""

    numbers: Sequence[int]  # the numbers of the pieces
    parameters: list[Tensor]
    states: list[dict[str, Tensor]]  # with the piece's own numbers while a step is taken
    optimizer: torch.optim.Optimizer
    rates: Rates
    fused: _Adagrad | None  # which then is used instead, and changes the piece's numbers in place


class _Plan(NamedTuple):
    """The places of gradients for some spans: which gradient goes where, and which part of it (None: all of it)."""

    wholes: Mapping[int, tuple[int, slice | None]]  # by piece
    beside: _Stepper | None  # steps what is less than a piece
    parts: Sequence[tuple[int, slice | None]]


class RangeOptimizer:
    """The optimizer of [start, stop), of a class that treats all elements alike. Gradients are scaled by the caller."""

    def __init__(self, store: Store, start: int, stop: int, scalars: Mapping[int, Mapping[str, float]]) -> None:
        self._store, self._start, self._stop = store, start, stop
        self._pieces: list[Piece] = []
        self._sizes: list[int] = []  # the sizes of gaps and pieces in turn
        at = start
        for entry in store.layout.entries if store.dtype.is_floating_point else ():
            first, last = max(entry.start, start), min(entry.stop, stop)
            if first < last:
                self._pieces.append(Piece(entry, first, last))
                self._sizes += [first - at, last - first]
                at = last
        self._sizes.append(stop - at)
        self._parameters = [store.parameters[p.start : p.stop] for p in self._pieces]
        self._states = [
            {name: vector[p.start : p.stop] for name, vector in store.optimizer_states.items()} for p in self._pieces
        ]
        for piece, state in zip(self._pieces, self._states, strict=True):
            values = scalars.get(piece.entry.index, {"step": 0.0} if store.counted else {})
            for name, value in values.items():
                state[name] = torch.tensor(value, dtype=torch.float32 if name == "step" else torch.float64)
        self._whole: _Stepper | None = None  # there is nothing to step on, or only its size
        if self._pieces and not store.parameters.is_meta:
            self._whole = self._stepper(range(len(self._pieces)), self._parameters, self._states)
        self._plans: dict[tuple[tuple[Span, ...], tuple[int, ...] | None], _Plan] = {}

    def _stepper(self, numbers: Sequence[int], parameters: list[Tensor], states: list[dict[str, Tensor]]) -> _Stepper:
        names = [self._pieces[i].entry.name for i in numbers]
        optimizer = self._store.spec.build(parameters, names=names)
        for parameter, state in zip(parameters, states, strict=True):
            optimizer.state[parameter] = state
        groups, rates = optimizer.param_groups, Rates(optimizer, self._store.spec)
        fused = self._store.spec.kind is torch.optim.Adagrad and optimizer.defaults["fused"] and len(groups) == 1
        adagrad = _Adagrad(groups[0], rates, parameters, states) if fused else None
        return _Stepper(numbers, parameters, states, optimizer, rates, adagrad)

    def scalars(self) -> Scalars:
        names = self._store.optimizer_states.keys()
        return {
            piece.entry.index: {name: float(value) for name, value in state.items() if name not in names}
            for piece, state in zip(self._pieces, self._states, strict=True)
        }

    def objection(self, spans: Sequence[Span], keys: bool) -> str | None:
        """Any part of the range can be stepped alone."""
        return None

    # -- steps -------------------------------------------------------------------------------------------------------
    def step(self, gradient: Tensor, lr: float, used: Sequence[int] | None = None) -> None:
        """`gradient` is of the whole range."""
        if self._whole is None:
            return
        alone = len(self._sizes) == 3 and self._sizes[1] == gradient.numel()
        grads: Sequence[Tensor | None] = (gradient,) if alone else torch.split_with_sizes(gradient, self._sizes)[1::2]
        if used is not None:
            grads = [g if p.entry.index in used else None for p, g in zip(self._pieces, grads, strict=True)]
        self._run(self._whole, grads, lr)

    def step_spans(
        self, spans: Sequence[Span], gradients: Sequence[Tensor], lr: float, used: Sequence[int] | None = None
    ) -> None:
        if self._whole is None:
            return
        if len(spans) == 1 and spans[0] == (self._start, self._stop):
            return self.step(gradients[0], lr, used)
        key = tuple(spans), None if used is None else tuple(used)
        plan = self._plans.get(key)
        if plan is None:  # kept, since workers push the same parts again and again
            if len(self._plans) >= MOST_KEPT:
                self._plans.clear()
            plan = self._plans[key] = self._planned(spans, used)
        if plan.wholes:
            grads: list[Tensor | None] = [None] * len(self._pieces)
            for i, (which, where) in plan.wholes.items():
                grads[i] = gradients[which] if where is None else gradients[which][where]
            self._run(self._whole, grads, lr)
        if plan.beside is not None:
            parts = [gradients[which] if where is None else gradients[which][where] for which, where in plan.parts]
            self._step_beside(plan.beside, parts, lr)

    def _planned(self, spans: Sequence[Span], used: Sequence[int] | None) -> _Plan:
        wholes: dict[int, tuple[int, slice | None]] = {}
        places: list[tuple[int, slice]] = []
        parts: list[tuple[int, slice | None]] = []
        for which, (first, last) in enumerate(spans):
            for i, piece in enumerate(self._pieces):
                low, high = max(first, piece.start), min(last, piece.stop)
                if low >= high or (used is not None and piece.entry.index not in used):
                    continue
                part = which, None if high - low == last - first else slice(low - first, high - first)
                if (low, high) == (piece.start, piece.stop):
                    wholes[i] = part
                else:
                    places.append((i, slice(low - piece.start, high - piece.start)))
                    parts.append(part)
        beside = self._beside([i for i, _ in places], [where for _, where in places]) if places else None
        return _Plan(wholes, beside, parts)

    def step_keys(self, keys: Tensor, values: Tensor, lr: float) -> None:
        """Only these keys' parameters and states are looked at; `keys` are ascending, and each occurs once."""
        edges = torch.tensor([edge for piece in self._pieces for edge in (piece.start, piece.stop)], dtype=torch.int64)
        at = torch.searchsorted(keys, edges).tolist()
        bounds = [(i, at[2 * i], at[2 * i + 1]) for i in range(len(self._pieces))]
        found = [(i, low, high) for i, low, high in bounds if low < high]
        if not found:
            return
        wheres = [keys[low:high] - self._pieces[i].start for i, low, high in found]
        numbers = [i for i, _, _ in found]
        beside = self._beside(numbers, wheres)
        self._step_beside(beside, [values[low:high] for _, low, high in found], lr)
        for i, where, parameter, state in zip(numbers, wheres, beside.parameters, beside.states, strict=True):
            self._parameters[i].index_copy_(0, where, parameter)  # copies were stepped
            for name in self._store.optimizer_states:
                self._states[i][name].index_copy_(0, where, state[name])

    def _beside(self, numbers: Sequence[int], wheres: Sequence[Any]) -> _Stepper:
        both, vectors = list(zip(numbers, wheres, strict=True)), self._store.optimizer_states
        parameters = [self._parameters[i][where] for i, where in both]
        states = [{k: v[where] if k in vectors else v for k, v in self._states[i].items()} for i, where in both]
        return self._stepper(numbers, parameters, states)

    def _step_beside(self, beside: _Stepper, gradients: Sequence[Tensor], lr: float) -> None:
        if beside.fused is not None:
            return self._run(beside, gradients, lr)
        both, vectors = list(zip(beside.numbers, beside.states, strict=True)), self._store.optimizer_states
        for i, state in both:
            state |= {name: value for name, value in self._states[i].items() if name not in vectors}
        self._run(beside, gradients, lr)
        for i, state in both:
            self._states[i] |= {name: value for name, value in state.items() if name not in vectors}

    def _run(self, stepper: _Stepper, gradients: Sequence[Tensor | None], lr: float) -> None:
        if stepper.fused is not None:
            return stepper.fused.step(gradients, lr)
        optimizer, parameters = stepper.optimizer, stepper.parameters
        stepper.rates.set(lr)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        with torch.no_grad():
            _bare_step(type(optimizer))(optimizer)  # type: ignore[arg-type]
        stepper.rates.check()
        for parameter in parameters:
            parameter.grad = None
