"""What each layer of a model costs: seconds forward and backward, bytes of its output and of its parameters.

The layers are the children of an nn.Sequential; of any other model, the blocks that it calls: its children, of
containers that are never called themselves (nn.ModuleList) the members, of a nested nn.Sequential its children. Each is
timed by itself, on the input that it gets in a step of the task, with the backward that pipelines use; but in the order
of a step, forward through all layers and then backward through all, because a layer whose weights the others have
driven out of the caches takes longer. What a model computes between its blocks is in none.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from torrential import randomness
from torrential.data.batches import training_batches
from torrential.errors import BadInput
from torrential.records import replace_file
from torrential.stages.whole_backward import backward as add_gradients
from torrential.step import run_step
from torrential.task import Task, build_model, training_samples

Progress = Callable[[int, int], None]  # passes over all layers done, passes
ENTRIES = 30  # times that entering backward is measured; the first ones are slow


class LayerProfile(msgspec.Struct, frozen=True, kw_only=True):
    """One layer, on a batch of a given size."""

    name: str
    """The layer's name in the model, as in `named_modules`."""
    kind: str
    """The class of the layer."""
    forward_seconds: float
    backward_seconds: float
    recompute_seconds: float
    """The seconds that recomputing the layer in backward adds: those of a forward that keeps nothing."""
    activation_bytes: int
    """The bytes of its output, which cross to the next stage if the model is cut here; so do those of its gradient."""
    parameter_bytes: int

    @property
    def seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds


class _Call(NamedTuple):
    args: Any  # nests of tensors
    kwargs: dict[str, Any]


class _Times(NamedTuple):
    """What one pass over a layer takes, in seconds."""

    forward: float
    backward: float
    recompute: float


def profile_task(
    task: Task,
    batch_size: int | None = None,
    *,
    layers: Sequence[str] | None = None,
    runs: int = 11,
    seed: int = 0,
    progress: Progress | None = None,
) -> list[LayerProfile]:
    """Profile the layers of a task's model on one batch of its training data, on the CPU with one thread.

    `batch_size`: samples, the task's own by default. `layers`: the names of the modules to profile, in the order of
    their calls; by default those that `blocks` finds. Times are medians of `runs`.
    """
    size = task.batch_size if batch_size is None else batch_size
    if size < 1:
        raise BadInput(f"batch_size must be at least 1 (got {size})")
    if runs < 1:
        raise BadInput(f"runs must be at least 1 (got {runs})")
    randomness.seed_all(randomness.CPU, seed, randomness.MODEL)
    model = build_model(task).train()
    batch = training_batches(task).fetch(torch.arange(min(size, training_samples(task))))
    chosen = blocks(model) if layers is None else _named(model, layers)
    with _one_thread():
        calls = _record_calls(chosen, lambda: run_step(task, model, batch))
        entering = min(_enter_backward() for _ in range(ENTRIES))
        called = {name: chosen[name] for name in calls}  # in the order of their first calls
        rounds = []
        for done in range(runs + 1):
            if progress is not None:
                progress(done, runs + 1)
            rounds.append(_time(called, calls, entering))
        del rounds[0]  # which warms up
        found = [
            _profile(name, module, calls[name], [times[name] for times in rounds]) for name, module in called.items()
        ]
    if progress is not None:
        progress(runs + 1, runs + 1)
    return found


def blocks(model: nn.Module, prefix: str = "") -> dict[str, nn.Module]:
    """The layers at which a model can be cut, by name; a model without children is one layer, named ""."""
    found: dict[str, nn.Module] = {}
    for name, child in model.named_children():
        path = f"{prefix}{name}"
        if isinstance(child, nn.Sequential | nn.ModuleList | nn.ModuleDict) and len(child):
            found |= blocks(child, f"{path}.")
        else:
            found[path] = child
    return found or {prefix.rstrip("."): model}


def save_profile(layers: Sequence[LayerProfile], path: Path) -> None:
    """Write a profile as JSON."""
    replace_file(path, msgspec.json.format(msgspec.json.encode(layers)) + b"\n")


def load_profile(path: Path) -> list[LayerProfile]:
    """Read what `save_profile` has written."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[LayerProfile])
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}; write it with 'torrential profile TASK --out {path}'") from error
    except msgspec.MsgspecError as error:
        raise BadInput(
            f"{path} is no profile ({error}); write one with 'torrential profile TASK --out FILE'"
        ) from error


def _named(model: nn.Module, names: Sequence[str]) -> dict[str, nn.Module]:
    known = dict(model.named_modules())
    missing = [name for name in names if name not in known]
    if missing:
        offered = ", ".join([*blocks(model)][:12])
        raise BadInput(f"the model has no module named {missing[0]!r}; its blocks are: {offered}")
    return {name: known[name] for name in names}


def _record_calls(chosen: dict[str, nn.Module], step: Callable[[], Any]) -> dict[str, list[_Call]]:
    """What each module is given in one step, by name, in the order of the first calls."""
    calls: dict[str, list[_Call]] = {}

    def note(name: str) -> Callable[[nn.Module, Any, dict[str, Any]], None]:
        def before(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            calls.setdefault(name, []).append(_Call(*_copied((args, kwargs))))

        return before

    hooks = [module.register_forward_pre_hook(note(name), with_kwargs=True) for name, module in chosen.items()]
    try:
        step()
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _copied(nest: Any) -> Any:
    """The nest with copies of its tensors, since a module may change its input in place. Copies know whether gradients
    flow through them."""
    return tree_map(lambda leaf: _copy(leaf) if isinstance(leaf, Tensor) else leaf, nest)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _ready(nest: Any) -> Any:
    """Copies as a module gets them in the middle of a model: what gradients flow through is no leaf of the graph."""
    return tree_map(lambda leaf: _copy(leaf).clone() if isinstance(leaf, Tensor) else leaf, nest)


def _enter_backward() -> float:
    """The seconds that a backward over nothing takes, which a layer in the middle of a model does not pay."""
    output = torch.ones(1, requires_grad=True).clone()
    began = time.perf_counter()
    add_gradients([output], [torch.ones(1)])
    return time.perf_counter() - began


def _profile(name: str, module: nn.Module, calls: list[_Call], rounds: list[_Times]) -> LayerProfile:
    with torch.no_grad():
        outputs = [module(*args, **kwargs) for args, kwargs in map(_ready, calls)]
    return LayerProfile(
        name=name,
        kind=type(module).__name__,
        forward_seconds=statistics.median(times.forward for times in rounds),
        backward_seconds=statistics.median(times.backward for times in rounds),
        recompute_seconds=statistics.median(times.recompute for times in rounds),
        activation_bytes=sum(t.nbytes for t in tree_flatten(outputs)[0] if isinstance(t, Tensor)),
        parameter_bytes=sum(p.nbytes for p in module.parameters()),
    )


def _time(modules: dict[str, nn.Module], calls: dict[str, list[_Call]], entering: float) -> dict[str, _Times]:
    """The seconds that each layer takes in one pass forward and back, all its calls together. Gradients are added up
    from pass to pass, as they are from microbatch to microbatch."""
    forward, backward, recompute = (defaultdict[str, float](float) for _ in range(3))
    ends: list[tuple[str, list[Tensor]]] = []
    row = [(one, call) for one in modules for call in calls[one]]
    for name, call in row:
        output, seconds = _timed_call(modules[name], call)
        forward[name] += seconds
        ends.append((name, [t for t in tree_flatten(output)[0] if isinstance(t, Tensor) and t.requires_grad]))
    for name, reached in reversed(ends):
        if reached:
            slopes = [torch.ones_like(t) for t in reached]
            began = time.perf_counter()
            add_gradients(reached, slopes)
            backward[name] += max(0.0, time.perf_counter() - began - entering)
    with torch.no_grad():
        for name, call in row:
            recompute[name] += _timed_call(modules[name], call)[1]
    return {one: _Times(forward[one], backward[one], recompute[one]) for one in modules}


def _timed_call(module: nn.Module, call: _Call) -> tuple[Any, float]:
    args, kwargs = _ready(call)
    began = time.perf_counter()
    output = module(*args, **kwargs)
    return output, time.perf_counter() - began


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
