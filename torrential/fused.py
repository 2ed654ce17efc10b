"""Which of torch's fused optimizer kernels give the numbers of the ordinary ones: tried once per process.

A fused kernel is several times faster on a flat buffer, and not always right: SGD's of torch 2.13 leaves parameters of
half precision on the CPU where they are. So none is used that was not seen to do what the ordinary kernel does, for the
class, the dtype, the kind of device and the options at hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_KINDS = {  # with a fused kernel, by the kind of device it exists on
    "cpu": (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad),
    "cuda": (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW),
}
_ELEMENTS = 100  # more than one vector register holds, and a remainder: kernels take the two in different ways
_STEPS = 3
_ROUNDINGS = 8  # of single precision and better: how far apart two ways to compute the same may come in so many steps

_found: dict[tuple[Any, ...], bool] = {}


def has_fused_kernel(kind: type[torch.optim.Optimizer], device_type: str) -> bool:
    """Whether torch has a fused kernel for this very class; it is for `agrees` to say whether it is right."""
    return kind in _KINDS.get(device_type, ())


def agrees(kind: type[torch.optim.Optimizer], dtype: torch.dtype, device_type: str, options: Mapping[str, Any]) -> bool:
    """Whether the fused kernel moves parameters as the ordinary one does. `options` are those of the class but `lr`."""
    key = kind, dtype, device_type, repr(sorted(options.items()))
    if key not in _found:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # waking others takes up to a hundred times as long as all of this
        _found[key] = _try(kind, dtype, device_type, dict(options))
        torch.set_num_threads(threads)
    return _found[key]


def _try(kind: type[torch.optim.Optimizer], dtype: torch.dtype, device_type: str, options: dict[str, Any]) -> bool:
    try:
        fused = _moved(kind, dtype, device_type, options | {"fused": True})
    except RuntimeError:
        return False  # torch has no such kernel for this dtype
    ordinary = _moved(kind, dtype, device_type, options | {"foreach": False})
    if dtype.itemsize < 4:  # a kernel that computes in wider numbers drifts away, by 1.5 within 1,500 steps of AdamW
        return all(torch.equal(a, b) for a, b in zip(fused, ordinary, strict=True))
    far = _ROUNDINGS * torch.finfo(dtype).eps
    return all(torch.allclose(a.double(), b.double(), rtol=far, atol=far) for a, b in zip(fused, ordinary, strict=True))


def _moved(
    kind: type[torch.optim.Optimizer], dtype: torch.dtype, device_type: str, options: dict[str, Any]
) -> list[Tensor]:
    """Parameters of about 1, and the state kept for them, after steps that move each by many roundings of its dtype."""
    ramp = torch.linspace(0.5, 1.5, _ELEMENTS)
    parameter, gradient = (values.to(device_type, dtype) for values in (ramp, ramp.flip(0)))
    optimizer = kind([parameter], lr=0.1, **options)  # type: ignore[call-arg]
    for _ in range(_STEPS):
        parameter.grad = gradient.clone()
        optimizer.step()
    return [parameter, *(v for v in optimizer.state[parameter].values() if torch.is_tensor(v))]
