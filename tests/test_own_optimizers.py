"""An optimizer of one's own, or one of torch's that looks at whole tensors, does in every strategy what it does in a
plain loop; where it cannot, it is refused in a line."""

from __future__ import annotations

import json
import re
import shutil
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import torrential as tt
from tests.probes import LocalSGD
from tests.test_contract import PLAIN, WORLDS
from tests.test_equivalence import assert_equal_models, fresh, plain_loop, small_task
from torrential.errors import BadInput, RunFailed
from torrential.params.whole import PER_PARAMETER
from torrential.records import Event
from torrential.strategies import STRATEGIES
from torrential.strategies.base import needs_servers

pytestmark = pytest.mark.timeout(120)
STEPS = 20


class ByShape(torch.optim.AdamW):
    """Weight decay for matrices, none for biases: the usual way to set up AdamW."""

    per_parameter = True

    def __init__(self, params: Iterable[Tensor], lr: float, weight_decay: float = 1.0) -> None:
        given = list(params)
        matrices, others = [p for p in given if p.ndim > 1], [p for p in given if p.ndim < 2]
        groups = [(matrices, weight_decay), (others, 0.0)]
        super().__init__([{"params": some, "weight_decay": decay} for some, decay in groups if some], lr=lr)


class ByMark(torch.optim.SGD):
    """Weight decay but where the model says otherwise."""

    per_parameter = True

    def __init__(self, params: Iterable[Tensor], lr: float) -> None:
        groups: dict[float, list[Tensor]] = {}
        for parameter in params:
            groups.setdefault(0.0 if getattr(parameter, "spared", False) else 0.5, []).append(parameter)
        super().__init__([{"params": some, "weight_decay": decay} for decay, some in groups.items()], lr=lr)


class Slow(nn.Parameter):
    """A model's own class of parameters."""


class ByClass(torch.optim.SGD):
    """A hundredth of the rate for parameters of a class."""

    per_parameter = True

    def __init__(self, params: Iterable[Tensor], lr: float) -> None:
        super().__init__([{"params": [p], "lr": lr / 100 if isinstance(p, Slow) else lr} for p in params], lr=lr)


class FixedState(torch.optim.SGD):
    """Keeps three numbers for a parameter, whatever its shape: as many elements as a trial's vectors have."""

    per_parameter = True

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["three"] = torch.ones(3)
        return super().step(closure)


class ByPlace(torch.optim.SGD):
    """The later a parameter comes, the faster it learns."""

    per_parameter = True

    def __init__(self, params: Iterable[Tensor], lr: float) -> None:
        super().__init__([{"params": [p], "lr": lr * (1 + place)} for place, p in enumerate(params)], lr=lr)


class Clipped(torch.optim.SGD):
    """The norm of the whole gradient matters; gradients are changed in place."""

    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.1)
        return super().step(closure)


class Counting(torch.optim.Optimizer):
    """Keeps a number of Python's, a state that is made anew at every step, and one that only matrices have."""

    per_parameter = True

    def __init__(self, params: Iterable[Tensor], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                state = self.state[parameter]
                if not state:
                    state["taken"], state["mean"] = 0, torch.full_like(parameter, 0.01)
                    if parameter.ndim > 1:
                        state["first"] = parameter.grad.clone()
                state["taken"] += 1
                state["mean"] = 0.9 * state["mean"] + parameter.grad
                parameter.sub_(state["mean"], alpha=group["lr"] / state["taken"] ** 0.5)
                if "first" in state:
                    parameter.sub_(state["first"], alpha=0.1 * group["lr"])


class Replacing(torch.optim.Optimizer):
    """Gives parameters new memory at every step, and the old memory to its state, whose tensors change places."""

    per_parameter = True

    def __init__(self, params: Iterable[Tensor], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                state = self.state[parameter]
                state["older"], state["old"] = state.get("old", parameter.data.clone()), parameter.data
                change = group["lr"] * parameter.grad - 0.5 * (state["old"] - state["older"])
                parameter.data = parameter.data - change


class Forgetful(torch.optim.SGD):
    """Counts steps where no checkpoint looks."""

    taken = 0

    def step(self, closure: Any = None) -> Any:
        self.taken = self.taken + 1
        return super().step(closure)


class Lookahead(torch.optim.SGD):
    """Keeps slow weights in a dict, and looks at them long after any trial."""

    def __init__(self, params: Iterable[Tensor], lr: float) -> None:
        super().__init__(params, lr=lr)
        self.slow = {p: p.detach().clone() for group in self.param_groups for p in group["params"]}


class Tallying(torch.optim.SGD):
    """Counts steps in a list, in an object, in a group, and in its state of what is no parameter."""

    def __init__(self, params: Iterable[Tensor], lr: float, where: str) -> None:
        super().__init__(params, lr=lr)
        self.where, self.tally, self.thing = where, [0], SimpleNamespace(tally=0)
        self.param_groups[0]["tally"] = [0]
        self.state["all"]["tally"] = 0  # type: ignore[index]

    def step(self, closure: Any = None) -> Any:
        if self.where == "list":
            self.tally[0] += 1
        elif self.where == "object":
            self.thing.tally += 1
        elif self.where == "group":
            self.param_groups[0]["tally"][0] += 1
        else:
            self.state["all"]["tally"] += 1  # type: ignore[index]
        return super().step(closure)


class Averaging(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            recent = self.state[parameter].setdefault("recent", deque(maxlen=2))
            recent.append(parameter.grad.clone())
            parameter.grad = sum(recent) / len(recent)
        return super().step(closure)


class Late(torch.optim.SGD):
    """Keeps a number in a group that first changes in its sixth step, after any trial."""

    per_parameter = True

    def __init__(self, params: Iterable[Tensor], lr: float) -> None:
        super().__init__(params, lr=lr)
        self.param_groups[0]["recent"] = [0.0]

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["taken"] = state.get("taken", 0) + 1
                if state["taken"] == 6:
                    self.param_groups[0]["recent"][0] += 1.0
        return super().step(closure)


class LateClipping(torch.optim.SGD):
    """Clips the norm of all gradients from its sixth step on, after any trial."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        given = [p for group in self.param_groups for p in group["params"]]
        for parameter in given:
            self.state[parameter]["taken"] = self.state[parameter].get("taken", 0) + 1
        if self.state[given[0]]["taken"] > 5:
            nn.utils.clip_grad_norm_(given, 0.3)
        return super().step(closure)


class Heir(ByShape):
    """What its base class says of itself is not inherited."""


class Clearing(torch.optim.SGD):
    """Halves its rate whenever its gradients are cleared."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        for group in self.param_groups:
            group["lr"] /= 2
        super().zero_grad(set_to_none)


class ClearingOfItsOwn(torch.optim.SGD):
    """The same, put in the place of the method when it is built."""

    def __init__(self, params: Iterable[Tensor], lr: float) -> None:
        super().__init__(params, lr=lr)
        self.zero_grad = lambda set_to_none=True: None  # type: ignore[method-assign,assignment,misc]


class Regrouping(torch.optim.SGD):
    """Makes groups anew in a step, the first or the tenth: all of them, or the first."""

    def __init__(self, params: Iterable[Tensor], lr: float, when: int, whole: bool) -> None:
        super().__init__(params, lr=lr)
        self.when, self.whole = when, whole

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["taken"] = self.state[parameter].get("taken", 0) + 1
        if self.state[parameter]["taken"] == self.when:
            if self.whole:
                self.param_groups = [dict(group) for group in self.param_groups]
            else:
                self.param_groups[0] = dict(self.param_groups[0])
        return super().step(closure)


class Freezing(torch.optim.SGD):
    """Leaves a parameter alone from its sixth step on, by taking it out of its group."""

    def step(self, closure: Any = None) -> Any:
        given = self.param_groups[0]["params"]
        for parameter in given:
            self.state[parameter]["taken"] = self.state[parameter].get("taken", 0) + 1
        if len(given) > 1 and self.state[given[0]]["taken"] == 6:
            given.pop()
        return super().step(closure)


class Clipping(torch.optim.SGD):
    """Looks at all gradients together, but only where they are large."""

    per_parameter = True

    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1000.0)
        return super().step(closure)


class LateNoise(torch.optim.SGD):
    """Draws from its sixth step on, after any trial."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["taken"] = state.get("taken", 0) + 1
                if state["taken"] >= 6:
                    parameter += torch.randn_like(parameter)
        return super().step(closure)


class Noisy(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(torch.randn_like(parameter), alpha=1e-3)
        return super().step(closure)


class Marked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(16, 24), nn.Linear(24, 4)
        self.leave.weight.spared = True  # type: ignore[assignment]

    def forward(self, inputs: Tensor) -> Tensor:
        return self.leave(self.enter(inputs).tanh())


class OfTwoClasses(Marked):
    def __init__(self) -> None:
        super().__init__()
        self.leave.weight = Slow(self.leave.weight.detach())


class Vectors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, inputs: Tensor) -> Tensor:
        return (inputs * self.scale)[:, :4]


def matrices() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 24, bias=False), nn.Tanh(), nn.Linear(24, 4, bias=False))


def images() -> nn.Module:
    net = nn.Sequential(nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, 6, 3), nn.Tanh(), nn.Conv2d(6, 4, 2), nn.Flatten())
    return net.to(memory_format=torch.channels_last)


def run(task: tt.Task, out: Path, strategy: str, world: str = "local", **options: Any) -> tt.TrainResult:
    served = {"servers": 2} if needs_servers(STRATEGIES[strategy]) else {}
    given = {"device": "cpu", "progress": False, "steps": STEPS} | WORLDS[world] | served | options
    return tt.train(task, strategy, out=out, world=world, **given)


def task_with(kind: str | type[torch.optim.Optimizer], model: Callable[[], nn.Module] | None = None) -> tt.Task:
    changes = {} if model is None else {"model": model}
    return small_task(160, optimizer=tt.optimizer(kind, lr=0.02), **changes)


def assert_plain(task: tt.Task, ours: tt.TrainResult, batch: int = 8) -> None:
    model = fresh(task)
    plain_loop(task, task.optimizer.kind(model.parameters(), lr=0.02), model, batch, steps=STEPS)  # type: ignore[call-arg]
    assert_equal_models(ours.model, model)


# -- shapes -----------------------------------------------------------------------------------------------------------
SERVED = [(strategy, servers, "sim") for strategy in ("bsp", "ssp", "downpour") for servers in (1, 2)]


@pytest.mark.parametrize(("strategy", "servers", "world"), [*SERVED, ("ssp", 1, "local"), ("downpour", 2, "local")])
def test_groups_by_shape_on_servers(strategy: str, servers: int, world: str, tmp_path: Path) -> None:
    """Found by a user: servers gave the optimizer flat vectors, so nothing was decayed."""
    task = task_with(ByShape)
    assert_plain(task, run(task, tmp_path / "run", strategy, world, servers=servers, **PLAIN[strategy]))


@pytest.mark.parametrize(
    ("workers", "options"), [(1, {}), (2, {}), (3, {"transport": "tcp"}), (3, {"world": "sim"})], ids=str
)
def test_groups_by_shape_in_an_all_reduce(workers: int, options: dict[str, Any], tmp_path: Path) -> None:
    task = task_with(ByShape)
    assert_plain(task, run(task, tmp_path / "run", "allreduce", workers=workers, **options), 8 * workers)


def test_groups_by_shape_with_several_workers_and_servers(tmp_path: Path) -> None:
    task = task_with(ByShape)
    assert_plain(task, run(task, tmp_path / "run", "bsp", workers=2, replicas=1), 16)


@pytest.mark.parametrize("strategy", ["allreduce", "ssp"])
@pytest.mark.parametrize(
    ("kind", "model"),
    [
        (ByMark, Marked),
        (ByClass, OfTwoClasses),
        (Counting, None),
        (Replacing, None),
        (ByShape, images),
        ("muon", matrices),
        ("rprop", None),
        ("asgd", None),
    ],
    ids=lambda given: given if isinstance(given, str) else getattr(given, "__name__", None),
)
def test_what_else_an_optimizer_looks_at_and_keeps(
    kind: Any, model: Callable[[], nn.Module] | None, strategy: str, tmp_path: Path
) -> None:
    task = task_with(kind, model)
    assert_plain(task, run(task, tmp_path / "run", strategy, "sim"))


@pytest.mark.parametrize("strategy", ["bsp", "downpour"])
def test_parameters_that_are_given_new_memory(strategy: str, tmp_path: Path) -> None:
    """Found by a user: after `p.data = ...` servers stepped memory that nobody reads, and the run ended well."""
    task = task_with(Replacing)
    workers = 2 if strategy == "bsp" else 1
    assert_plain(task, run(task, tmp_path / "run", strategy, workers=workers, **PLAIN[strategy]), 8 * workers)


def test_parameters_that_are_given_new_memory_stay_in_a_strategys_vector(tmp_path: Path) -> None:
    task = task_with(Replacing)
    options: dict[str, Any] = {"world": "sim", "workers": 2, "steps": STEPS, "progress": False, "out": tmp_path / "run"}
    assert_plain(task, tt.train(task, LocalSGD(period=1), **options), 16)


@pytest.mark.parametrize("strategy", ["allreduce", "ssp"])
def test_a_task_that_gives_parameters_new_memory_is_told_so(strategy: str, tmp_path: Path) -> None:
    """No step would reach it: the run would end well, and have trained nothing."""

    def step(model: Any, batch: Any) -> Tensor:
        model[0].weight.data = model[0].weight.data.clamp(-1, 1)
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    task = small_task(160, step=step, loss=None)
    with pytest.raises(RunFailed, match=r"the parameter 0\.weight was given new memory .*; change it in place"):
        run(task, tmp_path / "run", strategy)


# -- several tensors at once ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", [ByPlace, Clipped, Clipping])
def test_an_optimizer_that_looks_at_all_tensors_is_not_cut(kind: type[torch.optim.Optimizer], tmp_path: Path) -> None:
    task = task_with(kind)
    assert_plain(task, run(task, tmp_path / "all", "allreduce", "sim", workers=2), 16)
    assert_plain(task, run(task, tmp_path / "one", "ssp", "sim", servers=1))
    with pytest.raises(BadInput, match=rf"{kind.__name__} looks at all .* \(servers: 2\); use --servers 1"):
        run(task, tmp_path / "two", "ssp", servers=2)


@pytest.mark.parametrize("kind", [LateClipping, Heir])
@pytest.mark.parametrize("strategy", ["bsp", "ssp"])
def test_an_optimizer_that_promises_nothing_is_not_cut(
    strategy: str, kind: type[torch.optim.Optimizer], tmp_path: Path
) -> None:
    """No trial shows what it does later: one that clips from the sixth step on was cut, and trained otherwise."""
    task = task_with(kind)
    assert_plain(task, run(task, tmp_path / "one", strategy, "sim", servers=1))
    said = (
        rf"{kind.__name__} may look at all .* \(servers: 2\); use --servers 1, or write per_parameter = True in class"
    )
    with pytest.raises(BadInput, match=said):
        run(task, tmp_path / "two", strategy, servers=2)


def test_torchs_own_classes_are_known() -> None:
    """A class that a later torch brings is looked at before it is shared out among servers."""
    own = {c for c in vars(torch.optim).values() if isinstance(c, type) and issubclass(c, torch.optim.Optimizer)}
    assert {*PER_PARAMETER} == own - {torch.optim.Optimizer, torch.optim.LBFGS}


def test_no_more_servers_than_tensors(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="5 servers do not fit 4 tensors, which ByShape needs whole; use --servers 4"):
        run(task_with(ByShape), tmp_path / "run", "ssp", servers=5)


# -- what is refused --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("kind", "strategy", "said"),
    [
        ("adafactor", "ssp", "Adafactor cannot be run on a parameter server: its state 'row_var' is of another shape"),
        ("lbfgs", "allreduce", "LBFGS needs a closure that computes loss and gradients anew within a step"),
        ("muon", "ssp", "Muon cannot train this model: ValueError: Muon only supports 2D parameters"),
        (Forgetful, "ssp", "Forgetful cannot be run on a parameter server: it keeps taken outside of its state"),
        (Lookahead, "bsp", r"Lookahead cannot be run on a parameter server: it keeps slow\[0\] outside of its state"),
        (Noisy, "ssp", "Noisy cannot be run on a parameter server: it draws random numbers"),
        (Noisy, "allreduce", "Noisy draws random numbers, which differ from worker to worker"),
    ],
    ids=lambda given: given if isinstance(given, str) else getattr(given, "__name__", None),
)
def test_what_no_server_or_no_run_can_do_is_refused(kind: Any, strategy: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=said):
        run(task_with(kind), tmp_path / "run", strategy, workers=2)
    assert not (tmp_path / "run").exists()


def test_a_state_that_has_the_shape_of_a_trials_tensors_by_chance_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"FixedState cannot be .* server: its state 'three' is of another shape than"):
        run(task_with(FixedState, Vectors), tmp_path / "run", "ssp")


@pytest.mark.parametrize("kind", [Clearing, ClearingOfItsOwn])
def test_a_zero_grad_of_ones_own_is_refused(kind: type[torch.optim.Optimizer]) -> None:
    """No run calls it, so what it does besides would be left out silently."""
    with pytest.raises(BadInput, match=f"{kind.__name__} has a zero_grad of its own, .*; do in step what it does"):
        tt.optimizer(kind, lr=0.1)


@pytest.mark.parametrize("strategy", ["allreduce", "ssp"])
@pytest.mark.parametrize("whole", [True, False])
def test_groups_that_are_replaced_are_noticed(whole: bool, strategy: str, tmp_path: Path) -> None:
    """The run sets the rates of the groups that it knows, and had not looked whether they are still the optimizer's."""
    for when, kind in ((2, BadInput), (10, RunFailed)):
        task = small_task(160, optimizer=tt.optimizer(Regrouping, lr=0.02, when=when, whole=whole))
        with pytest.raises(kind, match="Regrouping replaces groups of its param_groups in a step"):
            run(task, tmp_path / str(when), strategy, "sim", servers=1 if strategy == "ssp" else None)


def test_parameters_that_leave_their_group_are_found_when_the_state_is_saved(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"Freezing keeps groups\[0\]\['params'\] outside of its state"):
        run(task_with(Freezing), tmp_path / "run", "allreduce", "sim")


@pytest.mark.parametrize("where", ["list", "object", "group", "state"])
def test_what_is_kept_outside_of_the_state_is_found_wherever_it_is(where: str, tmp_path: Path) -> None:
    task = small_task(160, optimizer=tt.optimizer(Tallying, lr=0.02, where=where))
    place = r"state\['all'\]\['tally'\] for no parameter" if where == "state" else ".*tally.* outside of its state"
    with pytest.raises(BadInput, match=f"it keeps {place}, which replicas and checkpoints"):
        run(task, tmp_path / "run", "bsp")


def test_a_container_in_the_state_is_not_said_to_be_outside_of_it(tmp_path: Path) -> None:
    """The mean of the last gradients, which are kept in a deque."""
    said = r"keeps a deque in its state \('recent'\), which "
    with pytest.raises(BadInput, match=f"Averaging cannot be run on a parameter server: it {said}replicas"):
        run(task_with(Averaging), tmp_path / "served", "bsp")
    history = run(task_with(Averaging), tmp_path / "run", "allreduce", "sim").history
    warned = [e.detail for e in history if isinstance(e, Event) and e.event == "warning"]
    assert len(warned) == 1 and re.search(
        f"Averaging {said}no checkpoint holds.*; keep tensors and numbers in", warned[0]
    )


@pytest.mark.parametrize("strategy", ["allreduce", "bsp"])
def test_what_changes_outside_of_the_state_after_the_trial_is_found_when_it_is_saved(
    strategy: str, tmp_path: Path
) -> None:
    with pytest.raises(
        RunFailed, match=r"Late keeps groups\[0\]\['recent'\]\[0\] outside of its state, and has changed"
    ):
        run(task_with(Late), tmp_path / "run", strategy)


def test_draws_that_begin_late_end_the_run(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"LateNoise draws random numbers, .* \(workers: 2\); use --workers 1"):
        run(task_with(LateNoise), tmp_path / "run", "allreduce", "sim", workers=2)


def test_adafactor_in_an_all_reduce(tmp_path: Path) -> None:
    task = task_with("adafactor")
    assert_plain(task, run(task, tmp_path / "run", "allreduce", "sim", workers=2), 16)


@pytest.mark.parametrize("layerwise", ["lars", "lamb"])
@pytest.mark.parametrize("servers", [1, 2])
def test_layerwise_rates_on_servers(servers: int, layerwise: str, tmp_path: Path) -> None:
    kind = {"lars": "sgd", "lamb": "adam"}[layerwise]
    task = small_task(160, optimizer=tt.optimizer(kind, lr=0.02))
    alone = run(task, tmp_path / "alone", "allreduce", "sim", layerwise=layerwise)
    served = run(task, tmp_path / "run", "ssp", "sim", servers=servers, layerwise=layerwise)
    assert_equal_models(served.model, alone.model)


@pytest.mark.parametrize(("kind", "option"), [("sgd", "nesterov"), ("sgd", "maximize"), ("adam", "amsgrad")])
def test_layerwise_rates_lose_no_option(kind: str, option: str, tmp_path: Path) -> None:
    layerwise, options = {"sgd": "lars", "adam": "lamb"}[kind], {"momentum": 0.9} if kind == "sgd" else {}
    task = small_task(160, optimizer=tt.optimizer(kind, lr=0.02, **{option: True}, **options))
    with pytest.raises(BadInput, match=f"{layerwise.upper()} has no {option}=True, which the task's optimizer has"):
        run(task, tmp_path / "run", "allreduce", layerwise=layerwise)


# -- going on ---------------------------------------------------------------------------------------------------------
def interrupted(whole: tt.TrainResult, out: Path) -> Path:
    """A copy of a run's directory as it was when half of its steps were done."""
    shutil.copytree(whole.out, out)
    shutil.rmtree(out / "checkpoints" / f"step-{STEPS:08d}")
    lines = (out / "records.jsonl").read_text().splitlines()
    kept = [line for line in lines if json.loads(line)["kind"] != "summary"]
    assert len(kept) == len(lines) - 1
    (out / "records.jsonl").write_text("".join(f"{line}\n" for line in kept))
    return out


@pytest.mark.parametrize("strategy", ["allreduce", "bsp"])
def test_a_resumed_run_ends_in_the_same_bytes(strategy: str, tmp_path: Path) -> None:
    task = task_with(Counting)
    whole = run(task, tmp_path / "whole", strategy, workers=2, evaluate_every=STEPS // 2)
    resumed = tt.train(task, resume=interrupted(whole, tmp_path / "again"), progress=False)
    for file in ("model.safetensors", "optimizer.safetensors"):
        ours, theirs = (load_file(r.out / "checkpoints" / f"step-{STEPS:08d}" / file) for r in (resumed, whole))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_what_is_kept_outside_of_the_state_does_no_harm_while_nobody_takes_over(tmp_path: Path) -> None:
    """Members that meet before the first step take over parameters, and no step has been counted anywhere."""
    task = task_with(Forgetful)
    assert_plain(task, run(task, tmp_path / "run", "allreduce", workers=2), batch=16)


def test_a_run_that_cannot_be_resumed_says_so(tmp_path: Path) -> None:
    task = task_with(Forgetful)
    whole = run(task, tmp_path / "whole", "allreduce", evaluate_every=STEPS // 2)
    with pytest.raises(RunFailed, match="Forgetful keeps taken outside of its state, which no checkpoint holds"):
        tt.train(task, resume=interrupted(whole, tmp_path / "again"), progress=False)


def test_an_optimizer_whose_run_cannot_be_resumed_is_warned_of(tmp_path: Path) -> None:
    result = run(task_with(Forgetful), tmp_path / "run", "allreduce")
    warned = [r.detail for r in result.history if isinstance(r, Event) and r.event == "warning"]
    assert any("this run cannot be resumed" in line for line in warned)


class KeepsGradient(torch.optim.Optimizer):
    """Keeps the very gradient, which a plain loop leaves to it, and a run fills again."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["last"] = [parameter.grad]
                parameter.sub_(group["lr"] * parameter.grad)


class ShrinksAtFirst(torch.optim.SGD):
    """Changes parameters when it is made."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.mul_(0.5)


@pytest.mark.parametrize("strategy", ["allreduce", "bsp", "downpour"])
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (KeepsGradient, r"KeepsGradient keeps the gradient itself in its state \(last\).*grad.clone\(\)"),
        (ShrinksAtFirst, "ShrinksAtFirst changes parameters when it is made.*do that in the model"),
    ],
)
def test_what_no_strategy_can_make_good_is_refused(kind: Any, words: str, strategy: str, tmp_path: Path) -> None:
    task = replace(tt.load_task("digits-mlp"), optimizer=tt.optimizer(kind, lr=0.05))
    options = {"server": "task"} if strategy == "downpour" else {}
    with pytest.raises(tt.TorrentialError, match=words):
        tt.train(task, strategy, workers=2, out=tmp_path / "run", progress=False, **options)
