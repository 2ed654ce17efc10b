"""Strategies that no table knows: of a program, of a file, of a package; in both worlds, in studies, and resumed."""

from __future__ import annotations

import json
import os
import pydoc
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar

import msgspec
import pytest
import torch
from test_bad_input import main_here, one_message, refused  # noqa: F401 (fixtures)

import torrential as tt
from torrential import config, records
from torrential.comm.schedules import ALGORITHMS
from torrential.config import RUN, WORLDS, LocalSettings, SimSettings, label_of, owner_of
from torrential.errors import BadInput, RunFailed, UnknownName
from torrential.options import explain
from torrential.records import MANIFEST, RECORDS, read_manifest
from torrential.strategies import STRATEGIES
from torrential.strategies.registry import check_object, registered, resolve_strategy
from torrential.study.ask import absolute_entries, split_entries
from torrential.study.directory import read_question
from torrential.trainer.state import NamedStates

Refused = Callable[..., str]
CLUSTER = {"compute": {"seconds_per_sample": 1e-3}}
WORLD: dict[str, dict[str, Any]] = {"local": {}, "sim": {"world": "sim", "cluster": CLUSTER}}
FILE = '''
"""A file with one strategy."""
from torrential import AllReduce
import torrential as tt

BAD = 13


def checked(period):
    if period == BAD:
        raise ValueError("an unlucky period")


class Mine(AllReduce):
    """Sums as allreduce does.

    And looks at its period.
    """

    period: int = 3
    """How many steps a period has."""

    def worker(self, ctx):
        checked(self.period)
        super().worker(ctx)
'''


def train(strategy: Any, out: Path, world: str, **options: Any) -> tt.TrainResult:
    given = {"workers": 2, "steps": 4, "device": "cpu", "progress": False} | WORLD[world] | options
    return tt.train("digits-mlp", strategy, out=out, **given)


def write(directory: Path, text: str = FILE, name: str = "mine.py") -> Path:
    path = directory / name
    path.write_text(text)
    return path


def recorded(run: Path) -> dict[str, Any]:
    return read_manifest(run).config


@pytest.fixture(autouse=True)
def path_as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", list(sys.path))  # a file puts its directory there
    yield


def own_class() -> type[tt.Strategy]:
    """A class that no other process can import."""

    class Local(tt.AllReduce):
        """One of a function."""

        period: int = 3
        rates: tuple[float, ...] = ()
        kept: ClassVar[list[str]] = ["of the class"]

        def worker(self, ctx: Any) -> None:
            assert self.period == 7 and self.kept == ["of the class"] and type(self) is Local
            super().worker(ctx)

    return Local


# -- objects of a program ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("world", WORLD)
def test_an_object_of_a_class_that_no_table_knows(world: str, tmp_path: Path) -> None:
    mine = train(own_class()(period=7), tmp_path / "mine", world)
    plain = train(tt.AllReduce(), tmp_path / "plain", world)
    for one, other in zip(mine.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(one, other)
    kept = recorded(mine.out)
    assert kept["strategy"] == f"{__name__}:own_class.<locals>.Local"
    assert kept["options"] == {"period": 7, "rates": [], "accumulate": 1, "overlap": True}
    assert (mine.summary.strategy, plain.summary.strategy) == ("own_class.<locals>.Local", "allreduce")


def test_a_class_takes_its_options_from_the_call_and_an_object_has_them(tmp_path: Path) -> None:
    assert recorded(train(tt.AllReduce, tmp_path / "run", "sim", accumulate=2).out)["options"]["accumulate"] == 2
    with pytest.raises(BadInput, match="accumulate is an option of the strategy, which was given as an object"):
        train(tt.AllReduce(), tmp_path / "other", "sim", accumulate=2)
    with pytest.raises(BadInput, match=r"a strategy is a name, a subclass of tt.Strategy or an object of one"):
        train(3, tmp_path / "other", "sim")
    assert not (tmp_path / "other").exists()


def test_a_strategys_own_code_that_raises_before_the_run(tmp_path: Path) -> None:
    class Picky(tt.AllReduce):
        period: int

        def __post_init__(self) -> None:
            if self.period > 5:
                raise ValueError("too long")

    with pytest.raises(BadInput, match=r"Picky's constructor raised ValueError: too long \(.*test_own_strategies.py:"):
        train(Picky, tmp_path / "run", "sim", period=9)
    with pytest.raises(BadInput, match="Picky has no default for period; give it with --set period="):
        train(Picky, tmp_path / "run", "sim")


# -- names, files, entry points ---------------------------------------------------------------------------------------
def test_the_table_is_what_it_was() -> None:
    names = [
        "allreduce",
        "bsp",
        "ssp",
        "backup",
        "downpour",
        "local",
        "adacomm",
        "diloco",
        "streaming",
        "easgd",
        "fedavg",
        "hogwild",
        "sandblaster",
        "pipeline",
        "pipedream",
        "tensor",
        "ddp",
    ]
    assert list(registered()) == list(STRATEGIES) == names
    for name, kind in STRATEGIES.items():
        for given in (name, kind, kind()):
            found = resolve_strategy(given)
            assert found.kind is kind and found.source == name
    with pytest.raises(UnknownName, match="no strategy named 'alreduce'; did you mean 'allreduce'"):
        resolve_strategy("alreduce")


def test_a_file_with_one_class_needs_no_name(tmp_path: Path) -> None:
    file = write(tmp_path)
    (found, named) = (resolve_strategy(f"{file}{name}") for name in ("", ":Mine"))
    assert found.kind is named.kind and found.source == named.source == f"{file}:Mine"
    assert resolve_strategy(found.kind(period=2)).source == f"{file}:Mine"
    assert found.kind.summary == "Sums as allreduce does."
    assert found.make({"period": "5"}) == found.kind(period=5)
    with pytest.raises(UnknownName, match="no option of Mine named 'perod'; did you mean 'period'"):
        found.make({"perod": "5"})


@pytest.mark.parametrize(
    ("text", "name", "said"),
    [
        ("x = 1", "", "mine.py holds no subclass of tt.Strategy; write one"),
        (FILE + "class Other(Mine): pass", "", r"mine.py holds 2 strategies \(Mine, Other\); say which: mine.py:NAME"),
        (FILE, ":Mein", "no strategy in .*mine.py named 'Mein'; did you mean 'Mine'"),
        (FILE, ":checked", "checked in .*mine.py is no subclass of tt.Strategy; .* is a function"),
        ("raise ValueError('no')", "", r"mine.py cannot be loaded: ValueError: no \(.*mine.py:1\)"),
        ("import torrential as tt\ntt.train('digits')", "", "mine.py:2: mine.py trains when it is imported"),
        (FILE.replace("period", "timeout"), "", "mine.py:.*: Mine has an option 'timeout', which is a name of the w"),
    ],
)
def test_files_that_cannot_be_used(text: str, name: str, said: str, tmp_path: Path, refused: Refused) -> None:  # noqa: F811
    file = write(tmp_path, text)
    with pytest.raises(BadInput, match=said):
        resolve_strategy(f"{file}{name}")
    assert "mine.py" in refused("train", "digits", "--strategy", f"{file}{name}", "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_file_with_task_and_strategy_is_run_once(tmp_path: Path) -> None:
    text = FILE + "\nwith open(__file__ + '.log', 'a') as log:\n    log.write('.')\n"
    file = write(tmp_path, text + "task = tt.load_task('digits-mlp')\n")
    for _ in range(2):
        tt.load_task(str(file))
        resolve_strategy(str(file))
    assert Path(f"{file}.log").read_text() == "."


@pytest.mark.parametrize("world", WORLD)
def test_a_file_from_the_command_line(world: str, tmp_path: Path, run_cli: Any) -> None:
    file, more = write(tmp_path), ["--world", "sim"] if world == "sim" else []
    args = ("train", "digits-mlp", "--strategy", file, "--set", "period=5", "--workers", 2, "--steps", 3, *more)
    done = run_cli(*args, "--device", "cpu", "--out", tmp_path / "run", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["strategy"] == "mine.py:Mine" and "mine.py:Mine, 2 workers" in done.stderr
    assert recorded(tmp_path / "run")["strategy"] == f"{file}:Mine"
    assert recorded(tmp_path / "run")["options"]["period"] == 5


def test_a_file_whose_program_fails_in_a_worker(tmp_path: Path, run_cli: Any) -> None:
    file = write(tmp_path)
    args = ("train", "digits-mlp", "--strategy", file, "--set", "period=13", "--device", "cpu")
    message = one_message(run_cli(*args, "--out", tmp_path / "run"), 1)
    line = FILE[: FILE.index("raise ValueError")].count("\n") + 1
    assert f"worker 0 failed at step 1: ValueError: an unlucky period ({file}:{line})" in message


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package with three entry points, of which one is whole."""
    write(tmp_path, FILE, "own_package.py")
    info = tmp_path / "own_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[torrential.strategies]\nmine = own_package:Mine\nbroken = own_package:Nothing\nodd = own_package:BAD\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("world", WORLD)
def test_an_entry_point(world: str, package: Path) -> None:
    found = resolve_strategy("mine")
    assert (found.kind.__module__, found.source) == ("own_package", "mine")
    run = train("mine", package / "run", world, period=4)
    assert recorded(run.out)["strategy"] == "mine" and recorded(run.out)["options"]["period"] == 4
    assert resolve_strategy(found.kind(period=9)).source == "mine"


def test_a_broken_entry_point_is_named_when_it_is_asked_for(package: Path, refused: Refused) -> None:  # noqa: F811
    assert list(registered()) == ["mine", "broken", "odd", *STRATEGIES]
    about = "the strategy broken of the package own-package (own_package:Nothing) cannot be loaded: AttributeError: "
    assert about in refused("train", "digits", "--strategy", "broken")
    assert "odd of the package own-package (own_package:BAD) is no subclass" in refused("strategies", "odd")


def test_they_are_listed_and_explained(package: Path, main_here: Any) -> None:  # noqa: F811
    assert "mine           of the package own-package\n" in main_here("strategies").out
    for name in ("mine", write(package)):
        shown = main_here("strategies", name).out
        assert shown.startswith("Sums as allreduce does.\n\nAnd looks at its period.\n")
        own = shown.partition("Options of Mine itself.\n")[2].partition("\n\n")[0]
        assert own.splitlines()[:2] == ["  period=3", "      How many steps a period has."]
        assert "accumulate=1" in own and own.count("=") == 4 and "One worker with accumulate=k" in own


class Odd(tt.AllReduce, kw_only=True):
    names: list[str] = []
    rates: tuple[float, ...] = (0.5, 0.25)
    either: int | str | None = None
    must: dict[str, int]


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ({"names": "a,b"}, {"names": ["a", "b"]}),
        ({"rates": "1,2"}, {"rates": (1.0, 2.0)}),
        ({"either": "x"}, {"either": "x"}),
        ({"rates": "x"}, "rates must be a list of numbers, as in 0.5,0.75 (given: 'x')"),
        ({"must": "x"}, "must must be dict[str, int] (given: 'x')"),
    ],
)
def test_options_of_any_kind_are_made_and_explained(given: dict[str, Any], made: Any) -> None:
    assert {option.name: option.default for option in explain(Odd) if option.default} == {
        "accumulate": "1",
        "overlap": "true",
        "rates": "0.5,0.25",
    }
    found = resolve_strategy(Odd)
    if isinstance(made, str):
        with pytest.raises(BadInput) as error:
            found.make({"must": {}} | given)
        assert str(error.value) == made
    else:
        assert found.make({"must": {}} | given) == Odd(**{"must": {}} | made)


class Bounded(tt.AllReduce):
    period: Annotated[int, msgspec.Meta(ge=1, le=9)] = 3
    share: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.5
    rates: tuple[float, ...] = ()
    most: Annotated[int, msgspec.Meta(ge=2)] | None = None


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"period": "x"}, "period must be a whole number of at least 1 up to 9 (given: 'x')"),
        ({"period": "4"}, "period must be a whole number of at least 1 up to 9 (given: '4')"),
        ({"period": 0}, "period must be a whole number of at least 1 up to 9 (given: 0)"),
        ({"share": 1.0}, "share must be a number of at least 0 below 1 (given: 1.0)"),
        ({"share": float("nan")}, "share must be a number of at least 0 below 1 (given: nan)"),
        ({"rates": (float("inf"),)}, "rates must be a list of numbers, as in 0.5,0.75, and finite (given: (inf,))"),
        ({"rates": "1,2"}, "rates must be a list of numbers, as in 0.5,0.75 (given: '1,2')"),
        ({"most": 1}, "most must be a whole number of at least 2 (given: 1)"),
        ({"overlap": "tru"}, "overlap must be true or false (given: 'tru'); did you mean 'true'?"),
    ],
)
def test_options_of_an_object_are_checked_as_those_of_the_command_line(wrong: Any, said: str, tmp_path: Path) -> None:
    for refuse in (
        lambda: train(Bounded(**wrong), tmp_path / "run", "sim"),
        lambda: tt.compare("digits-mlp", [Bounded(**wrong)], target=0.9, out=tmp_path / "study", progress=False),
    ):
        with pytest.raises(BadInput) as error:
            refuse()
        assert str(error.value) == said
    assert not list(tmp_path.iterdir())


def test_options_of_an_object_that_are_right_pass() -> None:
    check_object(Bounded(period=9, share=0, rates=(1, 2.5), most=None))
    for kind in STRATEGIES.values():
        check_object(kind())


def test_bounds_are_shown(main_here: Any, tmp_path: Path) -> None:  # noqa: F811
    text = FILE.replace("period: int = 3", "period: Annotated[int, Meta(ge=1, le=9)] = 3")
    file = write(tmp_path, f"from typing import Annotated\nfrom msgspec import Meta\n{text}")
    assert "  period=3  (at least 1 up to 9)\n      How many" in main_here("strategies", file).out
    assert "\n  accumulate=1  (at least 1)\n" in main_here("strategies", "allreduce").out


# -- options have one owner -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("field", "owner"),
    [
        ("timeout", "the worlds local, hosts, ray and sim"),
        ("transport", "the worlds local, hosts and ray"),
        ("gradients", "the world sim"),
        ("warmup", "the recipe"),
        ("lr", "the run"),
        ("name", "Strategy"),
        ("worker", "Strategy"),
    ],
)
def test_a_field_that_is_somebody_elses_is_refused_with_the_class(field: str, owner: str) -> None:
    with pytest.raises(BadInput) as error:
        msgspec.defstruct("Mine", [(field, int, 1)], bases=(tt.AllReduce,))
    assert str(error.value) == (
        f"Mine has an option {field!r}, which is a name of {owner} already; give it another name"
    )


def test_no_two_owners_have_an_option_in_common() -> None:
    own = [name for kind in STRATEGIES.values() for name in kind.__struct_fields__]
    assert [name for name in own if owner_of(name) is not None] == []
    recipe = {*config.Recipe.__struct_fields__, *config.Compression.__struct_fields__}
    assert len(recipe) == len(config.Recipe.__struct_fields__) + len(config.Compression.__struct_fields__)
    for kind in WORLDS.values():
        assert not (recipe | RUN) & {*kind.__struct_fields__}
    assert not recipe & RUN
    shared = {*config.Settings.__struct_fields__}
    assert {*LocalSettings.__struct_fields__} & {*SimSettings.__struct_fields__} == shared | {"algorithm"}
    (algorithm,) = (option for option in explain(SimSettings) if option.name == "algorithm")
    assert algorithm.choices == ["auto", *ALGORITHMS]


def test_the_arguments_of_a_run_and_a_study_are_nobodys_options() -> None:
    import inspect

    given = {name for function in (tt.train, tt.compare) for name in inspect.signature(function).parameters}
    assert given - {"options"} == RUN


@pytest.mark.parametrize(
    ("world", "option", "said"),
    [
        ("sim", "transport=tcp", "transport is for real processes; leave it out, or use --world local"),
        ("sim", "restart=true", "restart is for real processes"),
        ("sim", "hosts=2", "hosts is for real processes"),
        ("sim", "algorithm=native", "algorithm=native is for real processes; leave it out, or use --world local"),
        (
            "sim",
            "algorithm=rign",
            "algorithm must be auto, naive, direct, ring, halving, blocks or tree (given: 'rign')",
        ),
        ("local", "gradients=off", "gradients needs a simulation; add --world sim"),
        ("local", "processes=1", "processes needs a simulation"),
    ],
)
def test_a_world_refuses_the_other_ones_options(world: str, option: str, said: str, refused: Refused) -> None:  # noqa: F811
    assert said in refused("train", "digits", "--workers", 2, "--world", world, "--set", option)


# -- resumed ----------------------------------------------------------------------------------------------------------
def cut_off(run: tt.TrainResult, step: int) -> Path:
    """The run as if it had been killed after the checkpoint of a step."""
    for checkpoint in (run.out / "checkpoints").glob("step-*"):
        if int(checkpoint.name.removeprefix("step-")) > step:
            shutil.rmtree(checkpoint)
    kept = [r for r in run.history if not isinstance(r, records.Summary) and (r.step is None or r.step <= step)]
    (run.out / RECORDS).write_bytes(b"".join(records.encode(r) + b"\n" for r in kept))
    return run.out


def test_a_run_of_a_file_goes_on(tmp_path: Path, run_cli: Any) -> None:
    file = write(tmp_path)
    whole = train(str(file), tmp_path / "run", "sim", period=5, evaluate_every=2, steps=6)
    run = cut_off(whole, 2)
    done = run_cli("train", "--resume", run, "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["steps"], told["value"]) == (6, whole.summary.value)


def test_a_run_of_a_program_goes_on_there_and_says_so_elsewhere(tmp_path: Path, refused: Refused) -> None:  # noqa: F811
    kind = own_class()
    whole = train(kind(period=7), tmp_path / "run", "sim", evaluate_every=2, steps=6)
    run = cut_off(whole, 2)
    said = f"the strategy of {run} was made in a program ({__name__}:own_class.<locals>.Local); go on there with "
    assert said + f"tt.train(task, own_class.<locals>.Local(...), resume='{run}')" in refused("train", "--resume", run)
    with pytest.raises(BadInput, match="was made in a program"):
        tt.train("digits-mlp", resume=run, progress=False)
    with pytest.raises(BadInput, match=r"the options of .*Local have changed"):
        tt.train("digits-mlp", kind(period=8), resume=run, progress=False)
    with pytest.raises(BadInput, match=r"the strategy of .* has changed \(.*Local then, ssp now\)"):
        tt.train("digits-mlp", "ssp", resume=run, progress=False)
    resumed = tt.train("digits-mlp", kind(period=7), resume=run, progress=False)
    assert (resumed.summary.steps, resumed.summary.value) == (6, whole.summary.value)


def test_resuming_runs_no_strategys_file_that_others_may_have_chosen(tmp_path: Path, refused: Refused) -> None:  # noqa: F811
    file = write(tmp_path, FILE + "\nimport pathlib\npathlib.Path(__file__ + '.run').touch()\n")
    run = cut_off(train(str(file), tmp_path / "run", "sim", evaluate_every=2), 2)
    os.remove(f"{file}.run")
    for path in (file, run / MANIFEST, run):
        mode = path.stat().st_mode
        path.chmod(mode | 0o002)
        message = refused("train", "digits-mlp", "--resume", run)
        path.chmod(mode)
        assert f"every user can write to {path} (mode: " in message
        assert f"name it yourself: torrential train --resume {run} --strategy FILE" in message
    assert not Path(f"{file}.run").exists()


# -- studies ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "entries"),
    [
        ("ssp,mine.py", [("ssp", {}), ("mine.py", {})]),
        ("a/mine.py:Mine,ssp:staleness=3", [("a/mine.py:Mine", {}), ("ssp", {"staleness": "3"})]),
        ("mine.py:Mine:period=3+lr=0.1,x.py", [("mine.py:Mine", {"period": "3", "lr": "0.1"}), ("x.py", {})]),
        ("x.py:period=2,y=3", [("x.py", {"period": "2", "y": "3"})]),
        ("mine.py:slow=random:10:50,bsp", [("mine.py", {"slow": "random:10:50"}), ("bsp", {})]),
    ],
)  # fmt: skip
def test_entries_with_files(text: str, entries: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert split_entries([text]) == entries
    monkeypatch.chdir("/tmp")
    there = [(f"/tmp/{name}" if ".py" in name else name, options) for name, options in entries]
    assert split_entries([absolute_entries(text)]) == there


def test_what_strategies_are_called() -> None:
    names = {"ssp": "ssp", "/a/b/mine.py:Mine": "mine.py:Mine", "/a/mine.py": "mine.py", "__main__:Mine": "Mine"}
    assert {name: label_of(name) for name in names} == names


def study(out: Path, strategies: list[Any], **options: Any) -> tt.Comparison:
    given: dict[str, Any] = {"target": 0.5, "trials": 3, "workers": 2, "device": "cpu", "epochs": 1, "progress": False}
    return tt.compare("digits-mlp", strategies, out=out, **given | options)


def test_a_study_of_all_kinds_of_strategies(tmp_path: Path) -> None:
    kind, file = own_class(), write(tmp_path)
    cluster = tt.Cluster(name="quick", **CLUSTER)  # type: ignore[arg-type]
    entries = [tt.AllReduce(), tt.Downpour(push_every=4), kind(period=7, rates=(0.5, 0.25)), f"{file}:Mine:period=2"]
    told = study(tmp_path / "study", [*entries, "ssp"], cluster=cluster)
    names = ["allreduce", "downpour:push_every=4", "own_class.<locals>.Local:period=7+rates=[0.5, 0.25]"]
    assert [entry.name for entry in told.entries] == [*names, "mine.py:Mine:period=2", "ssp"]
    allreduce, downpour, *_, ssp = told.entries
    assert (allreduce.trials, allreduce.servers, ssp.servers, allreduce.workers) == (3, 0, 1, 2)
    assert downpour.options == {"push_every": 4} and allreduce.options == {}
    for entry in told.entries:
        assert len(entry.times) == 3 and entry.least <= entry.median <= entry.most
        assert entry.reached == sum(time < float("inf") for time in entry.times)
    assert len(told.pairs) == 10 and all(0 <= pair.p <= 1 and not pair.differs for pair in told.pairs)
    assert told.soonest is None and str(told) == told.sentence and told.sentence.startswith("undecided: ")
    assert (told.metric, told.target, told.result, told.directory) == ("accuracy", 0.5, True, tmp_path / "study")
    page = tt.report(told.directory)
    assert page == told.directory / "report.html" and "mine.py:Mine" in page.read_text()
    assert (told.directory / "trials.csv").read_text().count("\n") == 16


def test_a_study_that_is_decided(tmp_path: Path) -> None:
    given = [tt.AllReduce(), "allreduce:lr=1e-9"]
    told = study(tmp_path / "study", given, cluster=CLUSTER, trials=4)
    quick, slow = told.entries
    assert (quick.reached, slow.reached, told.soonest) == (4, 0, "allreduce")
    (pair,) = told.pairs
    assert pair.differs and (pair.first, pair.second) == ("allreduce", "allreduce:lr=1e-9")


def test_a_study_of_a_program_goes_on_there(tmp_path: Path, refused: Refused) -> None:  # noqa: F811
    out, kind = tmp_path / "study", own_class()
    first = study(out, [tt.AllReduce(), kind(period=7)], cluster=CLUSTER, trials=1)
    assert not first.result and first.sentence == "not a result: 1 trial each, and at least 3 are needed"
    before = {path: path.read_bytes() for path in out.rglob(RECORDS)}
    assert len(before) == 2
    again = study(out, [tt.AllReduce(), kind(period=7)], cluster=CLUSTER, trials=1)
    assert {path: path.read_bytes() for path in out.rglob(RECORDS)} == before and again == first
    said = refused("compare", "--resume", out)
    assert f"was made in a program; go on there with the same tt.compare(..., out='{out}')" in said
    with pytest.raises(BadInput, match="holds another study"):
        study(out, [tt.AllReduce(), kind(period=8)], cluster=CLUSTER, trials=1)


def test_a_study_of_objects_goes_on_from_the_command_line(tmp_path: Path, run_cli: Any) -> None:
    out, file = tmp_path / "study", write(tmp_path)
    cluster = write(tmp_path, "[compute]\nseconds_per_sample = 0.001\n", "quick.toml")
    mine = resolve_strategy(str(file)).kind
    study(out, [tt.Downpour(push_every=2), mine(period=4)], cluster=str(cluster), trials=1)
    assert read_question(out).asked.strategies[1].strategy == f"{file}:Mine"  # type: ignore[union-attr]
    shutil.rmtree(out / "runs" / "mine.py-Mine-period=4-1")
    done = run_cli("compare", "--resume", out, "--json")
    assert done.returncode == 0, done.stderr
    assert "1 of 2 runs are there already" in done.stderr
    file.write_text(FILE + "\n")
    assert "strategy's" in run_cli("compare", "--resume", out).stderr


def test_a_study_on_processes(tmp_path: Path, run_cli: Any) -> None:
    file = write(tmp_path)
    args = ("compare", "digits-mlp", "--strategies", f"allreduce,{file}:Mine:period=2", "--target", 0.5, "--trials", 1)
    done = run_cli(*args, "--device", "cpu", "--steps", 4, "--out", tmp_path / "study", "--json")
    assert done.returncode == 0, done.stderr
    assert [entry["name"] for entry in json.loads(done.stdout)["entries"]] == ["allreduce", "mine.py:Mine:period=2"]
    run = tmp_path / "study" / "runs" / "mine.py-Mine-period=2-1"
    assert recorded(run)["strategy"] == f"{file}:Mine"


def test_a_report_runs_no_file_of_a_strategy(tmp_path: Path) -> None:
    file = write(tmp_path)
    for seed in (0, 1):
        train(str(file), tmp_path / "runs" / str(seed), "sim", period=2, seed=seed)
    file.unlink()
    text = tt.report(tmp_path / "runs").read_text()
    assert "mine.py:Mine:period=2" in text and str(file) in text


def test_a_program_with_its_own_strategy(tmp_path: Path) -> None:
    """As a user runs it: the class is the program's own, and workers are processes."""
    program = FILE.replace("import torrential as tt", "import torrential as tt, json") + (
        "\nif __name__ == '__main__':\n"
        "    done = tt.train('digits-mlp', Mine(period=2), workers=2, steps=2, device='cpu', progress=False)\n"
        "    print(json.dumps([done.summary.strategy, done.summary.steps]))\n"
    )
    file = write(tmp_path, program, "program.py")
    done = subprocess.run([sys.executable, file], capture_output=True, text=True, cwd=tmp_path, timeout=50)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["Mine", 2]


# -- mistakes of somebody's first strategy ----------------------------------------------------------------------------
class Nothing(tt.Strategy, frozen=True, kw_only=True):
    """A program that ends at once."""

    def worker(self, ctx: tt.Context) -> None:
        pass


class NoVote(tt.Strategy, frozen=True, kw_only=True):
    """Rounds without a vote."""

    def worker(self, ctx: tt.Context) -> None:
        ctx.replica.synchronized()
        ctx.rounds(lambda: None, lambda decision: None)  # type: ignore[arg-type, return-value]


class Astray(tt.Strategy, frozen=True, kw_only=True):
    """A tensor for a member that is not there."""

    def worker(self, ctx: tt.Context) -> None:
        ctx.replica.synchronized()
        ctx.rounds(lambda: ctx.comm.send(ctx.replica.vector(), 7).wait(), lambda decision: None)


class Tiny(tt.Strategy, frozen=True, kw_only=True):
    """An update of no samples."""

    def samples_per_update(self, workers: int, batch_size: int) -> int:
        return 0


class Uneven(tt.Strategy, frozen=True, kw_only=True):
    """One member votes with a number more than the others."""

    def worker(self, ctx: tt.Context) -> None:
        ctx.replica.local()
        numbers = [1.0] * (2 + (ctx.comm.rank == 1))
        ctx.rounds(lambda: tt.Vote(1.0, ctx.data.share(1).samples, numbers), lambda decision: None)


class Narrow(tt.Strategy, frozen=True, kw_only=True):
    """A tensor for which there is no room."""

    def worker(self, ctx: tt.Context) -> None:
        ctx.replica.local()

        def propose() -> tt.Vote:
            if ctx.comm.rank == 0:
                ctx.comm.send(torch.ones(5), 1, "x").wait()
            else:
                ctx.comm.recv(torch.empty(4), 0, "x").wait()
            return tt.Vote(1.0, ctx.data.share(1).samples)

        ctx.rounds(propose, lambda decision: None)


class NothingToEvaluate(tt.Strategy, frozen=True, kw_only=True):
    """Parameters of each worker's own, of which nobody says what model they make."""

    def worker(self, ctx: tt.Context) -> None:
        ctx.replica.local(own=True)


class Unlike(tt.Strategy, frozen=True, kw_only=True):
    """A tensor that is passed on is taken over as another of as many bytes."""

    def worker(self, ctx: tt.Context) -> None:
        ctx.replica.local()

        def propose() -> tt.Vote:
            if ctx.comm.rank == 0:
                ctx.comm.pass_on(torch.ones(8), 1, "x", room=2).wait()
            else:
                ctx.comm.take([4], torch.float64, 0, "x", room=2).wait()
            return tt.Vote(1.0, ctx.data.share(1).samples)

        ctx.rounds(propose, lambda decision: None)


class Reshaped(tt.Strategy, frozen=True, kw_only=True):
    """A tensor is received into one of another type and shape, of as many elements."""

    def worker(self, ctx: tt.Context) -> None:
        ctx.replica.local()

        def propose() -> tt.Vote:
            if ctx.comm.rank == 0:
                ctx.comm.send(torch.ones(2, 3), 1, "x").wait()
            else:
                ctx.comm.recv(torch.empty(3, 2, dtype=torch.int32), 0, "x").wait()
            return tt.Vote(1.0, ctx.data.share(1).samples)

        ctx.rounds(propose, lambda decision: None)


class Outside(tt.Strategy, frozen=True, kw_only=True):
    """A member asks for a group of others."""

    def worker(self, ctx: tt.Context) -> None:
        ctx.replica.local()

        def propose() -> tt.Vote:
            ctx.comm.group([1]).barrier().wait()
            return tt.Vote(1.0, ctx.data.share(1).samples)

        ctx.rounds(propose, lambda decision: None)


class Strange(tt.Strategy, frozen=True, kw_only=True):
    """A member asks for a group with somebody who is not there."""

    def worker(self, ctx: tt.Context) -> None:
        ctx.replica.local()

        def propose() -> tt.Vote:
            ctx.comm.group([0, 1, 5]).barrier().wait()
            return tt.Vote(1.0, ctx.data.share(1).samples)

        ctx.rounds(propose, lambda decision: None)


@pytest.mark.parametrize("world", ["local", "sim"])
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (NothingToEvaluate, r"does not say what model they make; give it a method assembled\(parts\)"),
        (Nothing, r"the program of worker \d returned before the run was finished; .* ctx.leave\(\)"),
        (NoVote, "propose returned None; it must return a tt.Vote"),
        (Astray, r"worker \d exchanges a tensor with worker 7, which is no other member \(\d\)"),
        (Outside, r"worker 0 asks for a group of workers 1, in which it is not itself; put 0 among them"),
        (Strange, r"worker \d asks for a group of workers 0, 1, 5, of which 5 is no member; the members are 0, 1;"),
        (Tiny, "samples_per_update of Tiny gives 0"),
        (
            Narrow,
            r"worker 0 sent a tensor \(tag 'x'\) of float32 \[5\], and worker 1 expects one of float32 \[4\]; make",
        ),
        (
            Unlike,
            r"worker 0 sent a tensor \(tag 'x'\) of float32 \[8\], and worker 1 expects one of float64 \[4\]; make",
        ),
        (
            Reshaped,
            r"worker 0 sent a tensor \(tag 'x'\) of float32 \[2, 3\], and worker 1 expects one of int32 \[3, 2\]; make",
        ),
        (Uneven, r"Vote.numbers must be equally many on all members \(2 on worker 0, 3 on worker 1\)"),
    ],
)
def test_a_mistake_is_said_in_a_line(kind: type[tt.Strategy], said: str, world: str, tmp_path: Path) -> None:
    with pytest.raises(tt.TorrentialError, match=said):
        train(kind(), tmp_path / "run", world, workers=2)


class Endless(tt.Strategy, frozen=True, kw_only=True):
    """The coordinator goes on for ever."""

    def roles(self, workers: int, servers: int) -> tuple[tt.Role, ...]:
        return tt.Role("worker", workers, self.worker, "regroup"), tt.Role(
            "coordinator", 1, self.coordinator, "restart"
        )

    def worker(self, ctx: tt.Context) -> None:
        ctx.replica.local()
        ctx.rounds(lambda: tt.Vote(1.0, ctx.data.share(1).samples), lambda decision: None)

    def coordinator(self, ctx: tt.Context) -> None:
        while True:
            ctx.comm.receive(1.0)


@pytest.mark.parametrize("world", ["local", "sim"])
def test_a_coordinator_that_stays_when_all_workers_have_left_is_named(world: str, tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"^coordinator 0 has not left though all workers have, and has taken no step"):
        train(Endless(), tmp_path / "run", world, timeout=3)


class OneSided(tt.Strategy, frozen=True, kw_only=True):
    """The first worker receives what nobody sends; the second has voted."""

    def worker(self, ctx: tt.Context) -> None:
        ctx.replica.local()

        def propose() -> tt.Vote:
            if ctx.comm.rank == 0:
                ctx.comm.recv(torch.empty(1), source=1, tag="gossip").wait()
            return tt.Vote(1.0, ctx.data.share(1).samples)

        ctx.rounds(propose, lambda decision: None)


@pytest.mark.parametrize(("world", "transport"), [("local", "shared"), ("local", "unix"), ("sim", None)])
def test_a_tensor_that_nobody_sends_is_named_and_ends_nobody(world: str, transport: Any, tmp_path: Path) -> None:
    options = {} if transport is None else {"transport": transport}
    with pytest.raises(RunFailed) as failure:
        train(OneSided(), tmp_path / "run", world, timeout=2, **options)
    assert str(failure.value) == (
        "all workers have waited for one another for 2 s: worker 0 for worker 1 to send a tensor (tag 'gossip'), "
        "worker 1 for worker 0 in an all-gather (a vote is one); check that every recv has its send, and that all "
        "members start the same collectives in the same order; "
        "no checkpoint was made yet"
    )
    events = [r.event for r in records.read_records(tmp_path / "run" / RECORDS) if isinstance(r, records.Event)]
    assert not {"worker_hung", "worker_lost"} & set(events)


class Keeps(tt.AllReduce, frozen=True, kw_only=True):
    name: ClassVar[str] = "keeps"
    summary: ClassVar[str] = "keeps a tensor where a dict of them is wanted"

    def worker(self, ctx: tt.Context) -> None:
        kept = torch.zeros(3)
        ctx.state.own("velocity", lambda: kept, kept.copy_)  # type: ignore[arg-type, return-value]
        super().worker(ctx)


def test_a_state_that_is_no_dict_is_refused_when_it_is_registered(tmp_path: Path) -> None:
    with pytest.raises(RunFailed) as failure:
        train(Keeps(), tmp_path / "run", "sim")
    assert str(failure.value) == (
        "worker 0 failed at step 1: save of the state 'velocity' must return a dict of tensors (it returned Tensor); "
        'try {"value": tensor}; no checkpoint was made yet'
    )
    with pytest.raises(BadInput, match=r"must return a dict of tensors \(it has float at 'b'\)"):
        NamedStates().everybody("x", lambda: {"a": torch.zeros(1), "b": 1.0}, lambda saved: None)  # type: ignore[dict-item]


class KeepsLate(tt.AllReduce, frozen=True, kw_only=True):
    """Registers a state in the middle of a round."""

    name: ClassVar[str] = "keeps-late"
    summary: ClassVar[str] = "registers a state too late"
    late: int = 0

    def worker(self, ctx: tt.Context) -> None:
        kept = torch.zeros(3)
        ctx.replica.local()

        def propose() -> tt.Vote:
            if ctx.progress.step == self.late:
                ctx.state.everybody("velocity", lambda: {"value": kept}, lambda saved: kept.copy_(saved["value"]))
            return tt.Vote(1.0, ctx.data.share(1).samples)

        ctx.rounds(propose, lambda decision: None)


@pytest.mark.parametrize("late", [0, 2])
def test_a_state_that_is_registered_after_the_first_step_has_begun_is_refused(late: int, tmp_path: Path) -> None:
    with pytest.raises(RunFailed) as failure:
        train(KeepsLate(late=late), tmp_path / "run", "sim")
    assert str(failure.value) == (
        f"worker 0 failed at step {late + 1}: the state 'velocity' is registered after the first step has begun, where "
        "a run that goes on cannot load it in time; register it before the first step (before ctx.rounds); "
        "no checkpoint was made yet"
    )


def test_the_help_of_the_context_leads_to_that_of_every_part() -> None:
    text = pydoc.render_doc(tt.Context, renderer=pydoc.plaintext)
    named = set(re.findall(r'help\("(.*?)"\)', text))
    assert {name.rpartition(".")[2] for name in named} == {"Comm", "Data", "Replica", "State", "Progress", "Client"}
    for name in named:
        assert pydoc.render_doc(name, renderer=pydoc.plaintext).startswith("Python Library Documentation: class")
