"""What an optimizer is like that is run on whole tensors: found out by trying it on small ones of the model's kinds.

torch's SGD, Adam, AdamW, Adagrad and RMSprop treat every element alike, so they may be run on any part of a flat vector
(`state_keys` in params/base.py). Any other class, one's own above all, may look at shapes, at the other parameters, or
at their order. It is given the model's trained parameters, in their order and in their shapes, and what else must hold
for it to be cut, kept or resumed is not assumed but tried:

    together   three steps on all tensors                                      what every other trial is held against
    alone      the same for each tensor, with an optimizer of its own          may servers share the tensors out?
               (and with gradients 10,000 times as large, and as small: it may clip)
    resumed    two steps, and the third by a new optimizer with the old state  is its state all that it keeps?
    slowed     the third step at half the rate                                 does it notice the run's schedule?

No trial shows what an optimizer does in its hundredth step. So servers share out the tensors of a class only if that
class is known to step each tensor by itself, or says so (`per_parameter = True`), and the trial agrees.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from torrential.errors import BadInput, RunFailed
from torrential.optim.outside import Outside, is_number, kept
from torrential.optim.rates import Rates
from torrential.optimizers import OptimizerSpec
from torrential.params.layout import Layout, ParameterEntry
from torrential.usercode import failed

_STEPS = 3
_SIZES = (1.0, 1e4, 1e-4)  # of gradients: one that clips them may look at all of them
_MOST = 3  # elements along each dimension of a tensor that is tried
_ROUNDINGS = 16  # of the dtype: how far apart two ways to compute the same may come

# These very classes step each tensor by itself: so does each of their algorithms, in all its kernels. LBFGS is missing,
# which looks at all of them. A subclass may do anything.
PER_PARAMETER = (
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adafactor,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.Muon,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
    torch.optim.SparseAdam,
)

DRAWS = "{name} draws random numbers, which differ from worker to worker (workers: {workers}); use --workers 1"

Number = type | torch.dtype  # what kind of number a state is: one of Python's types, or a tensor's dtype
State = dict[str, Any]


@dataclass(frozen=True)
class OptimizerTraits:
    """The traits of an optimizer class over the tensors of a model, found in a trial."""

    elements: Mapping[int, tuple[str, ...]]  # by entry: states with one value for each of its elements
    numbers: Mapping[str, Number]  # states that are one number
    others: str | None  # what servers cannot keep of its state, in words; None: nothing
    separable: bool  # whether the steps of a tensor depended on that tensor alone, in the trial
    per_parameter: bool  # whether its class is known to be so in every step, or says so
    unsaved: str | None  # what its steps may depend on that no checkpoint holds, and where it is; None: nothing
    obeys: bool  # whether it notices that the rate of a group has changed
    draws: bool  # whether it draws random numbers

    @property
    def divisible(self) -> bool:
        """Whether servers may share the tensors out."""
        return self.separable and self.per_parameter

    def names(self) -> list[str]:
        """The names of the states with one value for each element, over all tensors."""
        return sorted({name for names in self.elements.values() for name in names})


_found: dict[tuple[Any, ...], OptimizerTraits] = {}


def form_of(spec: OptimizerSpec, layout: Layout, device_type: str = "cpu") -> OptimizerTraits:
    """Try the optimizer. Raises BadInput if it cannot train such tensors, or changes its learning rate by itself."""
    key = *spec.key, layout.entries, device_type
    if key not in _found:
        with torch.random.fork_rng(devices=[]):
            _found[key] = _try(spec, in_order(layout), device_type)
    return _found[key]


def in_order(layout: Layout) -> list[ParameterEntry]:
    """The entries as the model defines them, which is the order an optimizer is given its parameters in."""
    return list(reversed(layout.entries))


def as_parameter(entry: ParameterEntry, tensor: Tensor) -> nn.Parameter:
    """`tensor` in the place of the model's parameter: of its class, with the attributes that the model has given it."""
    parameter: nn.Parameter = Tensor._make_subclass(entry.kind, tensor, True)
    vars(parameter).update(entry.marks)
    return parameter


def lies_in(tensor: Tensor, place: Tensor) -> bool:
    """Whether a tensor is in this very memory, in the same order."""
    return tensor.data_ptr() == place.data_ptr() and tensor.stride() == place.stride()


class _Trial:
    """An optimizer on small tensors that stand for some of the model's, which begin alike in every trial."""

    def __init__(
        self,
        spec: OptimizerSpec,
        entries: Sequence[ParameterEntry],
        device_type: str,
        size: float = 1.0,
        most: int = _MOST,
    ) -> None:
        """`size`: of gradients; `most`: elements along each dimension."""
        self._entries, self._device, self._size, self._most = entries, device_type, size, most
        self.parameters = [as_parameter(e, self._values(e, 0)) for e in entries]
        self.optimizer = spec.build(self.parameters, device_type, [e.name for e in entries])
        self.odd: str | None = None  # what it does that no strategy could make good
        if not all(torch.equal(p, self._values(e, 0)) for e, p in zip(entries, self.parameters, strict=True)):
            self.odd = "changes parameters when it is made, which every process would do again; do that in the model"
        self._rates, self._base = Rates(self.optimizer, spec), spec.lr
        self.seen = [self._keys()]  # of the state of each tensor: at first, and after every step

    def _values(self, entry: ParameterEntry, number: int) -> Tensor:
        random = torch.Generator().manual_seed(entry.index * (_STEPS + 1) + number)
        shape = [min(size, self._most) for size in entry.shape]
        return torch.randn(shape, generator=random).to(self._device, entry.dtype)

    def step(self, number: int, share: float = 1.0) -> None:
        for entry, parameter in zip(self._entries, self.parameters, strict=True):
            parameter.grad = self._values(entry, number) * self._size
        self._rates.set(self._base * share)
        self.optimizer.step()
        self._rates.check()
        self.seen.append(self._keys())
        for parameter in self.parameters:
            assert parameter.grad is not None
            for name, state in self.optimizer.state.get(parameter, {}).items():
                if any(torch.is_tensor(leaf) and _shares(leaf, parameter.grad) for leaf in tree_leaves(state)):
                    self.odd = (
                        f"keeps the gradient itself in its state ({name}), whose memory the next one will have; keep a "
                        "copy (grad.clone())"
                    )

    def _keys(self) -> list[set[str]]:
        return [set(self.optimizer.state.get(parameter, ())) for parameter in self.parameters]

    def run(self, last: float = 1.0) -> _Trial:
        """All steps, the last of them at a share of the rate."""
        for number in range(1, _STEPS):
            self.step(number)
        self.step(_STEPS, last)
        return self

    def states(self) -> Iterator[tuple[ParameterEntry, nn.Parameter, State]]:
        for entry, parameter in zip(self._entries, self.parameters, strict=True):
            yield entry, parameter, self.optimizer.state[parameter]

    def equals(self, other: _Trial) -> bool:
        return all(_alike(a, b) for a, b in zip(self.parameters, other.parameters, strict=True))


def _shares(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() != 0


def _alike(a: Tensor, b: Tensor) -> bool:
    far = _ROUNDINGS * torch.finfo(a.dtype).eps
    return torch.allclose(a, b, rtol=far, atol=far, equal_nan=True)


def _try(spec: OptimizerSpec, entries: list[ParameterEntry], device_type: str) -> OptimizerTraits:
    before = torch.get_rng_state()
    try:
        together = _Trial(spec, entries, device_type).run()
        draws = not torch.equal(torch.get_rng_state(), before)
        slowed = _Trial(spec, entries, device_type).run(last=0.5)
    except RunFailed as error:
        raise BadInput(str(error)) from error
    except Exception as error:
        raise failed(f"{spec.kind.__name__} cannot train this model:", error) from error
    if together.odd is not None:
        raise BadInput(f"{spec.kind.__name__} {together.odd}")
    return OptimizerTraits(
        elements={e.index: tuple(k for k, v in s.items() if _of_elements(k, v, p)) for e, p, s in together.states()},
        numbers=_numbers(together),
        others=_others(together) or _fixed(together, _Trial(spec, entries, device_type, most=_MOST + 1).run()),
        separable=_separable(spec, entries, device_type),
        per_parameter=_is_per_parameter(spec.kind),
        unsaved=_unsaved(spec, entries, device_type, together),
        obeys=not slowed.equals(together),
        draws=draws,
    )


def _unsaved(spec: OptimizerSpec, entries: list[ParameterEntry], device_type: str, together: _Trial) -> str | None:
    """What its steps may depend on besides tensors and numbers of its state: a tensor that it keeps elsewhere, a number
    that changes there, an object in its state, or something not to be seen but by what it does."""
    first = _Trial(spec, entries, device_type)
    changed = Outside(first.optimizer).changed(together.optimizer)
    if changed is not None:
        return changed
    odd = (
        f"a {type(v).__name__} in its state ({k!r})"
        for _, _, s in together.states()
        for k, v in s.items()
        if not kept(v)
    )
    unknown = next(odd, "something outside of its state")
    for number in range(1, _STEPS):
        first.step(number)
    after = _Trial(spec, entries, device_type)
    for (_, old, state), new in zip(first.states(), after.parameters, strict=True):
        new.data.copy_(old.detach())
        after.optimizer.state[new] = {k: v.clone() if torch.is_tensor(v) else v for k, v in state.items() if kept(v)}
    try:
        after.step(_STEPS)
    except Exception:
        return unknown  # it cannot do without
    return None if after.equals(together) else unknown


def _separable(spec: OptimizerSpec, entries: list[ParameterEntry], device_type: str) -> bool:
    for size in _SIZES:
        try:
            together = _Trial(spec, entries, device_type, size).run()
            alone = [_Trial(spec, [entry], device_type, size).run() for entry in entries]
        except Exception:
            return False  # it wants to see all of them
        if not all(_alike(a.parameters[0], b) for a, b in zip(alone, together.parameters, strict=True)):
            return False
    return True


def _is_per_parameter(kind: type[torch.optim.Optimizer]) -> bool:
    """Whether this very class is known, or says, to step each tensor by itself: what it says is not inherited, for a
    subclass may have another step."""
    return kind in PER_PARAMETER or vars(kind).get("per_parameter") is True


def _of_elements(key: str, value: object, parameter: Tensor) -> bool:
    return torch.is_tensor(value) and value.shape == parameter.shape and not (key == "step" and is_number(value))


def _numbers(trial: _Trial) -> dict[str, Number]:
    found = {}
    for _, parameter, state in trial.states():
        for key, value in state.items():
            if is_number(value) and not _of_elements(key, value, parameter):
                found[key] = value.dtype if torch.is_tensor(value) else type(value)
    return found


def _fixed(trial: _Trial, larger: _Trial) -> str | None:
    """A state that had the shape of its tensor by chance, in words: it is not that of a larger one."""
    for (_, small, state), (_, large, grown) in zip(trial.states(), larger.states(), strict=True):
        for key, value in state.items():
            if _of_elements(key, value, small) and key in grown and not _of_elements(key, grown[key], large):
                return f"its state {key!r} is of another shape than the parameter"
    return None


def _others(trial: _Trial) -> str | None:
    first, *steps = trial.seen
    for keys in steps[:-1] + ([first] if any(first) else []):
        odd = [key for some, all_ in zip(keys, steps[-1], strict=True) for key in some ^ all_]
        if odd:
            return f"its state {odd[0]!r} comes and goes"
    for _, parameter, state in trial.states():
        for key, value in state.items():
            if _of_elements(key, value, parameter):
                if value.dtype != parameter.dtype:
                    return f"its state {key!r} is of another dtype than the parameters ({value.dtype})"
            elif not is_number(value):
                what = "of another shape than the parameter" if torch.is_tensor(value) else "neither tensor nor number"
                return f"its state {key!r} is {what}"
    return None
