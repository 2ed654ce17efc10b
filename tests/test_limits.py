"""When runs end, and how they go on further."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from made_up import config
from torch.nn import functional as F

import torrential as tt
from tests.test_equivalence import assert_equal_models
from tests.test_listeners import WORLDS, Hears, a_step, a_task, an_evaluation
from torrential import checkpoint as checkpoints
from torrential.config import LocalSettings
from torrential.errors import BadInput
from torrential.limits import Patience, idle_patience
from torrential.records import RECORDS, Evaluation, Event, Summary, read_manifest, read_records
from torrential.strategies import STRATEGIES

# those that train a model of one layer
SIMULATED = [name for name, k in STRATEGIES.items() if "sim" in k.worlds and k().has_whole_model()]

SIM = WORLDS["sim"]


def patience_of(count: int, values: list[float], maximize: bool = True, min_delta: float = 0.0) -> Patience:
    of = config(settings=LocalSettings(patience=count, min_delta=min_delta))
    return Patience(of, maximize, [an_evaluation(10 * place, value) for place, value in enumerate(values, start=1)])


# -- patience ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("values", "given", "without"),
    [
        ([0.5, 0.5, 0.5], {}, 2),
        ([0.5, 0.4, 0.6, 0.5], {}, 1),
        ([0.5, 0.4, 0.3], {"maximize": False}, 0),
        ([0.5, 0.6, 0.7], {"min_delta": 0.15}, 0),  # of the best that counted, not of the one before
        ([0.5, 0.6, 0.64, 0.65], {"min_delta": 0.15}, 3),
        ([0.5, math.nan, 0.5], {}, 2),
        ([math.nan, math.nan, 0.1], {}, 0),
    ],
)
def test_patience_counts_what_is_no_improvement(values: list[float], given: dict[str, Any], without: int) -> None:
    assert patience_of(without + 1, values, **given).stop_reason() is None
    if without:
        reason = patience_of(without, values, **given).stop_reason()
        assert reason is not None and reason.startswith(
            f"{without} evaluations without improvement (patience={without}"
        )


def test_patience_looks_at_validation_alone() -> None:
    patience = patience_of(2, [0.5])
    for record in (an_evaluation(20, 0.1, "test"), a_step(30), an_evaluation(40, 0.1)):
        patience.record(record)
    assert patience.stop_reason() is None
    patience.record(an_evaluation(50, math.nan))
    assert patience.stop_reason() == "2 evaluations without improvement (patience=2); the best was at step 10"


def test_patience_that_cannot_run_out_is_said_to_have_no_effect() -> None:
    def said(**settings: Any) -> list[str]:
        return idle_patience(config(epochs=5, settings=LocalSettings(**settings)))

    assert said() == said(patience=3) == said(patience=9, evaluate_every=20) == []
    (line,) = said(patience=4)
    assert line.startswith("patience=4 has no effect: it takes 5 evaluations, and this run has no more than 5; use a")
    assert len(said(patience=10, evaluate_every=25)) == 1


def hopeless(epochs: int = 50) -> tt.Task:
    return a_task(metric=lambda outputs, targets: torch.tensor(0.25), epochs=epochs)


@pytest.mark.parametrize("strategy", SIMULATED)
def test_a_simulated_run_loses_patience_at_the_same_moment_every_time(strategy: str, tmp_path: Path) -> None:
    given = {"workers": 2, "progress": False, "patience": 3, **SIM}
    first, second = (tt.train(hopeless(), strategy, out=tmp_path / name, **given) for name in ("first", "second"))
    assert [r for r in first.history if not isinstance(r, Summary)] == [
        r for r in second.history if not isinstance(r, Summary)
    ]
    (stopped,) = (r for r in first.history if isinstance(r, Event) and r.event == "stopped")
    before = [r for r in first.history[: first.history.index(stopped)] if isinstance(r, Evaluation)]
    first_step = 1 if STRATEGIES[strategy].uses_rate else 2  # epochs: sandblaster evaluates where it begins, too
    assert [r.epoch for r in before] == [first_step + more for more in range(4)]
    assert stopped.detail.startswith("3 evaluations without improvement (patience=3); the best was at step ")
    assert 4 * 90 <= first.summary.samples < (5 + first_step) * 90


def test_real_processes_lose_patience(tmp_path: Path) -> None:
    result = tt.train(hopeless(500), workers=2, out=tmp_path / "run", progress=False, patience=2)
    (stopped,) = (r for r in result.history if isinstance(r, Event) and r.event == "stopped")
    assert "patience=2" in stopped.detail and result.summary.samples < 500 * 90
    with pytest.raises(BadInput, match=r"is finished: it had \d+ evaluations without improvement"):
        tt.train(hopeless(500), resume=tmp_path / "run")
    with pytest.raises(BadInput, match=r"is finished: it had \d+ evaluations without improvement"):
        tt.train(hopeless(500), resume=tmp_path / "run", epochs=1000)


# -- the best checkpoints ---------------------------------------------------------------------------------------------
def saved(directory: Path, values: list[float | None], minimize: bool = False) -> list[int]:
    for step, value in enumerate(values, start=1):
        whole = checkpoints.Checkpoint(
            step=step, epoch=0, cursor=0, samples=0, seed=0, members=[0], model={"w": torch.tensor([step])}, value=value
        )
        checkpoints.save(directory, whole, keep_best=2, minimize=minimize)
    return sorted(int(path.name.removeprefix("step-")) for path in directory.iterdir())


def test_the_best_checkpoints_stay_beside_the_newest(tmp_path: Path) -> None:
    values = [0.3, 0.9, 0.5, 0.9, 0.9, None, 0.1]
    assert saved(tmp_path / "most", values) == [2, 4, 6, 7]
    assert saved(tmp_path / "least", values, minimize=True) == [1, 6, 7]  # the second best is the newest
    assert checkpoints.load(tmp_path / "most" / "step-00000004").value == 0.9
    assert checkpoints.load(tmp_path / "most" / "step-00000006").value is None


def test_a_damaged_checkpoint_is_none_of_the_best(tmp_path: Path) -> None:
    saved(tmp_path, [0.9, 0.8])
    (tmp_path / "step-00000001" / checkpoints.STATE).write_text("{}")
    assert saved(tmp_path / "on", [0.1, 0.2, 0.3, 0.4]) == [3, 4]


def test_a_run_keeps_its_best(tmp_path: Path) -> None:
    task = a_task(metric=F.cross_entropy, maximize=False, epochs=6)
    result = tt.train(task, out=tmp_path / "run", progress=False, keep_best=2, lr=30.0, **SIM)
    values = {r.step: r.value for r in result.history if isinstance(r, Evaluation) and r.split == "validation"}
    best = sorted(values, key=lambda step: (values[step], step))[:2]
    kept = sorted(int(path.name.removeprefix("step-")) for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == sorted({*best, *sorted(values)[-2:]}) and len(values) == 6


# -- going on further -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("strategy", "world"),
    [*((name, "sim") for name in SIMULATED if name != "easgd"), ("allreduce", "local")],  # easgd begins at the centre
)
def test_a_finished_run_goes_on_as_if_it_had_never_ended(strategy: str, world: str, tmp_path: Path) -> None:
    workers = 1 if strategy in ("ssp", "downpour", "hogwild") else 2  # one alone, so that there is one order
    given = {"workers": workers, "progress": False, **WORLDS[world]} | ({"backups": 0} if strategy == "backup" else {})
    whole = tt.train(a_task(), strategy, epochs=5, out=tmp_path / "whole", **given)
    part = tt.train(a_task(), strategy, epochs=2, out=tmp_path / "part", **given)
    hears = Hears()
    onward = tt.train(a_task(), resume=tmp_path / "part", epochs=5, progress=False, listeners=[hears])
    assert onward.summary.steps == whole.summary.steps and onward.summary.samples == 5 * 90
    assert_equal_models(onward.model, whole.model)
    (resumed,) = (r for r in onward.history if isinstance(r, Event) and r.event == "resumed")
    assert (resumed.event, resumed.step, resumed.detail) == ("resumed", part.summary.steps, "epochs: 5, before: 2")
    assert list(hears.run.history) == part.history[:-1] == onward.history[: len(part.history) - 1]
    assert hears.heard == onward.history[len(part.history) - 1 :] and hears.run.config.epochs == 5
    assert sum(isinstance(r, Summary) for r in read_records(tmp_path / "part" / RECORDS)) == 1
    assert read_manifest(tmp_path / "part").config["epochs"] == 5


def details(result: tt.TrainResult) -> list[str]:
    return [r.detail for r in result.history if isinstance(r, Event) and r.event == "resumed"]


def test_steps_go_further(tmp_path: Path) -> None:
    first = tt.train(a_task(), out=tmp_path, steps=5, progress=False, **SIM)
    assert first.summary.steps == 5
    with pytest.raises(BadInput, match=r"is finished: it has taken 5 steps \(--steps 5\); to go on further, give it"):
        tt.train(a_task(), resume=tmp_path, epochs=10)
    assert tt.train(a_task(), resume=tmp_path, steps=9, progress=False).summary.steps == 9
    last = tt.train(a_task(), resume=tmp_path, steps=1000, epochs=4, progress=False)
    assert last.summary.samples == 4 * 90
    assert details(last) == ["steps: 9, before: 5", "epochs: 4, before: 3, steps: 1000, before: 9"]


def test_targets_go_further(tmp_path: Path) -> None:
    first = tt.train(hopeless(3), out=tmp_path, target=0.25, progress=False, **SIM)
    assert first.summary.reached and first.summary.samples == 90
    for given in ({}, {"epochs": 9}, {"target": 0.2}):
        with pytest.raises(BadInput, match=r"is finished: it has reached its target \(--target 0.25?\)"):
            tt.train(hopeless(3), resume=tmp_path, **given)
    last = tt.train(hopeless(3), resume=tmp_path, target=0.5, progress=False)
    assert (
        not last.summary.reached and last.summary.samples == 3 * 90 and details(last) == ["target: 0.5, before: 0.25"]
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, r"is finished: it has trained 2 epochs \(--epochs 2\); to go on further, give it more of that"),
        ({"epochs": 1}, r"it has trained 2 epochs \(--epochs 1\)"),
        ({"target": 0.9}, r"it has trained 2 epochs \(--epochs 2\)"),
        ({"epochs": 0}, r"epochs must be a whole number of at least 1 \(given: 0\)"),
        ({"steps": 2.5}, r"steps must be a whole number of at least 1 \(given: 2.5\)"),
        ({"target": math.nan}, r"target must be a finite number \(given: nan\)"),
        ({"epochs": 4, "target": 97}, r"an accuracy is between 0 and 1 \(target: 97\)"),
        ({"epochs": 4, "patience": 0}, r"patience must be .* \(given: 0\)"),
        (
            {"epochs": 4, "replicas": 1},
            r"a resumed run keeps its options; leave out replicas \(what may change: epochs",
        ),
    ],
)
def test_limits_that_leave_nothing_to_do_are_refused(given: dict[str, Any], said: str, tmp_path: Path) -> None:
    tt.train(a_task(epochs=2), out=tmp_path, progress=False, **SIM)
    before = {path: path.read_bytes() for path in tmp_path.glob("*.json*")}
    with pytest.raises(BadInput, match=said):
        tt.train(a_task(), resume=tmp_path, progress=False, **given)
    assert {path: path.read_bytes() for path in tmp_path.glob("*.json*")} == before


def test_what_follows_the_length_of_a_run_is_said_to_jump(tmp_path: Path) -> None:
    given = {"progress": False, "lr": 0.5, **SIM}
    for schedule, rates in (("cosine", "0.25, and had come to 0"), ("step", "0.05, and had come to 0.0005")):
        tt.train(a_task(epochs=2), out=tmp_path / schedule, schedule=schedule, **given)
        onward = tt.train(a_task(), resume=tmp_path / schedule, epochs=4, progress=False)
        (line,) = (r.detail for r in onward.history if isinstance(r, Event) and r.event == "warning")
        length = "it follows the length of the run, which was 180 samples and is 360 now"
        assert line == f"the learning rate goes on at {rates}; {length}"
    task = a_task(epochs=2, schedule=lambda share: 1 - share / 2)
    tt.train(task, out=tmp_path / "own", **given)
    onward = tt.train(task, resume=tmp_path / "own", epochs=4, progress=False)
    (line,) = (r.detail for r in onward.history if isinstance(r, Event) and r.event == "warning")
    assert line.startswith("the learning rate goes on at 0.375, and had come to 0.25; ")
    assert tt.train(task, resume=tmp_path / "own", epochs=5, progress=False).summary.samples == 5 * 90
    tt.train(a_task(epochs=2), out=tmp_path / "constant", **given)
    onward = tt.train(a_task(), resume=tmp_path / "constant", epochs=4, progress=False)
    assert [r.event for r in onward.history if isinstance(r, Event)] == ["resumed"]


def test_a_run_that_left_no_checkpoint_cannot_go_on(tmp_path: Path) -> None:
    tt.train(a_task(), out=tmp_path, progress=False, gradients="off", **SIM)
    with pytest.raises(BadInput, match="is finished, and has left no checkpoint to go on from"):
        tt.train(a_task(), resume=tmp_path, epochs=9)
    for option in ({"patience": 2}, {"keep_best": 2}):
        with pytest.raises(BadInput, match="nothing is evaluated or saved with gradients=off"):
            tt.train(a_task(), gradients="off", **SIM, **option)


def test_older_manifests_are_read_as_they_were(tmp_path: Path) -> None:
    plain = msgspec.to_builtins(config())
    del plain["minimize"], plain["settings"]["patience"]
    assert msgspec.convert(plain, type(config())) == config()
