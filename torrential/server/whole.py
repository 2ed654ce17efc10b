"""torch.optim on the whole tensors of a range, each in its true shape: for every class that is not known to treat all
elements alike.

    parameters  |....|aaaa|bb|cccccc|....|      ranges are cut where tensors begin (`bounds` in server/optimizer.py)
    optimizer        c    b  a                  sees tensors of the model's shapes in the model's order

State is the optimizer's own business: it is made when the optimizer makes it, and moves into the store after the step
in which it appears, so that replicas, copies and checkpoints find it there; and so does a parameter that it has given
new memory (`p.data = ...`). An optimizer sees the tensors of its range only; one whose steps depend on more is not cut
at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torrential.errors import RunFailed
from torrential.optim.outside import Outside
from torrential.optim.rates import Rates
from torrential.params.layout import ParameterEntry
from torrential.params.whole import as_parameter, in_order, lies_in
from torrential.server.messages import Span
from torrential.server.optimizer import RangeOptimizer, Scalars, Store


def optimizer_of(
    store: Store, start: int, stop: int, scalars: Mapping[int, Mapping[str, float]]
) -> RangeOptimizer | WholeOptimizer:
    """The optimizer of [start, stop). `scalars`: by entry, what it keeps one number of; entries that it has kept
    nothing for yet are missing."""
    return (RangeOptimizer if store.form is None else WholeOptimizer)(store, start, stop, scalars)


class WholeOptimizer:
    """The optimizer of the tensors in [start, stop). Gradients are scaled by the caller."""

    def __init__(self, store: Store, start: int, stop: int, scalars: Mapping[int, Mapping[str, float]]) -> None:
        assert store.form is not None
        self._store, self._form = store, store.form
        self._entries = [e for e in in_order(store.layout) if start <= e.start < stop]
        assert all(entry.stop <= stop for entry in self._entries)
        self._places = [e.view(store.parameters) for e in self._entries]
        self._parameters = [as_parameter(e, place) for e, place in zip(self._entries, self._places, strict=True)]
        self._optimizer: torch.optim.Optimizer | None = None  # there is nothing to step on, or only its size
        if self._entries and not store.parameters.is_meta:
            names = [entry.name for entry in self._entries]
            self._optimizer = store.spec.build(self._parameters, names=names)
            self._rates = Rates(self._optimizer, store.spec)
            self._outside = Outside(self._optimizer)
            for entry, parameter in zip(self._entries, self._parameters, strict=True):
                if entry.index in scalars:
                    self._optimizer.state[parameter] = self._restored(entry, scalars[entry.index])
            self._keep()

    def _restored(self, entry: ParameterEntry, numbers: Mapping[str, float]) -> dict[str, Any]:
        state: dict[str, Any] = {n: entry.view(self._store.states[n]) for n in self._form.elements[entry.index]}
        for name, value in numbers.items():
            kind = self._form.numbers[name]
            state[name] = kind(value) if isinstance(kind, type) else torch.tensor(value, dtype=kind)
        return state

    def _keep(self) -> None:
        """Have the store hold the parameters, and what the optimizer keeps for each element, wherever that has made new
        tensors for them. All are copied before any is moved: the new tensor of one may be the place of another."""
        moved: list[tuple[Tensor, Tensor]] = []
        for entry, state in self._begun():
            unknown = state.keys() - self._form.numbers.keys() - {*self._form.elements[entry.index]}
            if unknown:
                raise RunFailed(
                    f"{self._store.spec.kind.__name__} keeps {sorted(unknown)[0]!r} in its state, which it did not at "
                    "first, so servers have no place for it; use another optimizer, or --strategy allreduce"
                )
            for name in self._form.elements[entry.index]:
                if name not in state:
                    raise RunFailed(
                        f"{self._store.spec.kind.__name__} keeps no {name!r} for {entry.name}, which it did for a "
                        "smaller one; use another optimizer, or --strategy allreduce"
                    )
                place = entry.view(self._store.states[name])
                if not lies_in(state[name], place):
                    moved.append((place, state[name].clone()))
                    state[name] = place
        for parameter, place in zip(self._parameters, self._places, strict=True):
            if not lies_in(parameter, place):
                moved.append((place, parameter.data.clone()))
                parameter.data = place
        for place, value in moved:
            place.copy_(value)

    def _begun(self) -> list[tuple[ParameterEntry, dict[str, Any]]]:
        """Entries that the optimizer keeps something for, or has made a step of; with what it keeps."""
        if self._optimizer is None:
            return []
        state = self._optimizer.state
        return [(e, state[p]) for e, p in zip(self._entries, self._parameters, strict=True) if state.get(p)]

    def scalars(self) -> Scalars:
        if self._optimizer is not None:
            self._outside.check(self._optimizer)
        return {
            entry.index: {name: self._number(name, state[name]) for name in state if name in self._form.numbers}
            for entry, state in self._begun()
        }

    def _number(self, name: str, value: Any) -> float:
        """A number as servers pass it on; a whole number that a float cannot hold is refused."""
        plain = value.item() if torch.is_tensor(value) else value
        if isinstance(plain, int) and int(float(plain)) != plain:
            raise RunFailed(
                f"{self._store.spec.kind.__name__} keeps {name!r} = {plain} in its state, which servers cannot pass on "
                "exactly; use --strategy allreduce"
            )
        return float(plain)

    def objection(self, spans: Sequence[Span], keys: bool) -> str | None:
        """The reason to refuse a push, in words that go on from "worker 3"; None: there is none."""
        name = self._store.spec.kind.__name__
        if keys:
            return f"pushed gradients for single keys, where {name} needs whole tensors; push all of the gradient"
        for entry in self._entries:
            inside = [first <= entry.start and entry.stop <= last for first, last in spans]
            touched = any(first < entry.stop and entry.start < last for first, last in spans)
            if touched and not any(inside):
                return f"pushed a part of the gradient of {entry.name}, which {name} needs whole; push all of it"
        return None

    # -- steps -------------------------------------------------------------------------------------------------------
    def step_spans(
        self, spans: Sequence[Span], gradients: Sequence[Tensor], lr: float, used: Sequence[int] | None = None
    ) -> None:
        if self._optimizer is None:
            return
        for entry, parameter in zip(self._entries, self._parameters, strict=True):
            if used is None or entry.index in used:
                parameter.grad = _whole(entry, parameter, spans, gradients)
        self._rates.set(lr)
        self._optimizer.step()
        self._rates.check()
        for parameter in self._parameters:
            parameter.grad = None
        self._keep()

    def step_keys(self, keys: Tensor, values: Tensor, lr: float) -> None:
        raise AssertionError("refused before")


def _whole(
    entry: ParameterEntry, parameter: nn.Parameter, spans: Sequence[Span], gradients: Sequence[Tensor]
) -> Tensor | None:
    """A copy, since an optimizer may change the gradients it is given, and these are the worker's."""
    for (first, last), gradient in zip(spans, gradients, strict=True):
        if first <= entry.start and entry.stop <= last:
            return gradient[entry.start - first : entry.stop - first].view(parameter.shape).clone()
    return None
