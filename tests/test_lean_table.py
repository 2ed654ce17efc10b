"""Every strategy with bf16, compiled or recomputing: the run without it within a tolerance, or refused. What is
promised stands in docs/lean.md, and is read from there."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest
from pages import ROOT
from torch import Tensor, nn

import torrential as tt
from tests.test_loop_runs import PREPARED, STEP, launch
from tests.test_precision import SIM, task, works
from torrential.errors import BadInput
from torrential.strategies import STRATEGIES

pytestmark = pytest.mark.timeout(240)  # whichever test comes first compiles for all

OPTIONS: dict[str, dict[str, Any]] = {
    "precision=bf16": {"precision": "bf16"},
    "compile=true": {"compile": True},
    "recompute=sqrt": {"recompute": "sqrt"},
}
LOOPS = "scripts with a loop of their own"
ALONE = {"ssp", "downpour", "easgd", "hogwild"}  # strategies whose steps depend on when workers come
Place = tuple[str, str]  # a strategy and an option


def promised() -> dict[Place, str]:
    """What the table in docs/lean.md says of each strategy and option."""
    lines = (ROOT / "docs" / "lean.md").read_text().partition("| strategy | `precision=bf16`")[2].splitlines()[2:]
    found = {}
    for line in lines:
        names, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        for name in re.findall(r"`(\w+)`", names) or [names]:
            found |= {(name, option): cell for option, cell in zip(OPTIONS, cells, strict=True)}
    return found


PROMISED = promised()
EQUAL = {place: float(cell) for place, cell in PROMISED.items() if re.fullmatch(r"[\d.]+", cell)}
REFUSED = {place: cell for place, cell in PROMISED.items() if place not in EQUAL and place[0] != LOOPS}


def smooth(drop: float = 0.2) -> nn.Module:
    """A model in which no last bit becomes a large difference; one of its layers draws."""
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(drop), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2))


def train(out: Path, strategy: str, world: str, workers: int, **options: Any) -> dict[str, Tensor]:
    given = (SIM if world == "sim" else {}) | {"steps": 4, "device": "cpu", "progress": False} | options
    if (strategy, workers) == ("backup", 1):
        given["backups"] = 0  # there is nobody to wait for otherwise
    model = functools.partial(smooth, 0.0) if strategy == "sandblaster" else smooth  # whose objective may not draw
    return tt.train(task(model), strategy, workers=workers, out=out, **given).model.state_dict()


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Simulated runs, each made once: a strategy, workers, and an option or none."""

    @functools.cache
    def result(strategy: str, workers: int, option: str = "") -> dict[str, Tensor]:
        return train(tmp_path_factory.mktemp("run") / "run", strategy, "sim", workers, **OPTIONS.get(option, {}))

    return result


def farthest(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((tensor - other[name]).abs().max()) for name, tensor in one.items())


def test_the_table_has_every_strategy() -> None:
    assert {name for name, _ in PROMISED} == {*STRATEGIES, LOOPS}


@pytest.mark.parametrize(("strategy", "option"), [p for p in EQUAL if "sim" in STRATEGIES[p[0]].worlds])
def test_simulated_runs_are_the_plain_ones_within_the_tolerance(simulated: Any, strategy: str, option: str) -> None:
    if option == "precision=bf16" and not works("bf16"):
        pytest.skip("this CPU has no bf16")
    workers = 1 if strategy in ALONE else 2
    far = farthest(simulated(strategy, workers, option), simulated(strategy, workers))
    assert far <= EQUAL[strategy, option]
    assert far > 0 or option != "precision=bf16"


@pytest.mark.parametrize("strategy", sorted({name for name, _ in EQUAL}))
def test_real_runs_compute_what_simulated_ones_do(simulated: Any, strategy: str, tmp_path: Path) -> None:
    """One worker. bf16 and recomputation go together in one run, since the latter changes no bit."""
    twin = "allreduce" if strategy == "ddp" else strategy
    plain, half = simulated(twin, 1), "bf16" if works("bf16") else "float32"
    compiled = train(tmp_path / "compiled", strategy, "local", 1, compile=True)
    assert farthest(compiled, plain) <= EQUAL[strategy, "compile=true"]
    lean = train(tmp_path / "lean", strategy, "local", 1, precision=half, recompute="sqrt")
    assert farthest(lean, plain) <= EQUAL[strategy, "precision=bf16"]


@pytest.mark.parametrize(("strategy", "option"), REFUSED)
def test_what_is_refused_is_refused_with_the_reason(strategy: str, option: str, tmp_path: Path) -> None:
    how = {"workers": 2, "device": "cpu", "progress": False, "out": tmp_path / "run"} | OPTIONS[option]
    with pytest.raises(BadInput, match=re.escape(REFUSED[strategy, option])):
        tt.train(task(smooth), strategy, **how)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("option", OPTIONS)
def test_scripts_do_it_by_themselves(option: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=re.escape(PROMISED[LOOPS, option])):
        launch(tmp_path, PREPARED + "for x, _ in loader:\n" + STEP, **OPTIONS[option])
