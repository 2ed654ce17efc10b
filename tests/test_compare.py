"""`torrential compare` and `torrential report`: on real processes once, killed and called again; else simulated."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from made_up import config, question, write_run

import torrential as tt
from torrential import cli
from torrential.cli import entry
from torrential.errors import BadInput, RunFailed, Terminated
from torrential.records import MANIFEST, RECORDS, Evaluation, Step, read_manifest, read_records
from torrential.study.ask import StudyRequest
from torrential.study.conduct import is_finished
from torrential.study.directory import open_directory, read_question
from torrential.study.plan import Trial
from torrential.study.question import make_question
from torrential.study.runner import Train
from torrential.worlds.local.warm import Warm

SSP_FIRST = 0  # a seed with which the second entry is run first
CLUSTER = "[compute]\nseconds_per_sample = 0.001\n"


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def command(*args: object) -> None:
    cli.app([str(arg) for arg in args], standalone_mode=False)


def refused(*args: object) -> str:
    with pytest.raises(BadInput) as error:
        command(*args)
    return str(error.value)


# -- on real processes ------------------------------------------------------------------------------------------------
def until(done: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 50
    while not done():
        assert process.poll() is None and time.monotonic() < end, process.communicate()
        time.sleep(0.01)


def test_killed_and_called_again(tmp_path: Path) -> None:
    """In the middle of the second run; the first diverges, which is its result and not to be repeated."""
    out = tmp_path / "study"
    args = ["digits-mlp", "--strategies", "allreduce,ssp:lr=1e18", "--target", 0.5, "--trials", 1, "--seed", SSP_FIRST]
    base = [sys.executable, "-m", "torrential", "compare"]

    def begun() -> list[Path]:
        return sorted(path.parent for path in out.glob(f"runs/*/{MANIFEST}"))

    with subprocess.Popen([*base, *map(str, args), "--out", str(out)], stdout=-1, stderr=-1, text=True) as process:
        until(lambda: [path.name[:3] for path in begun() if not is_finished(path)] == ["all"], process)
        process.kill()
        _, err = process.communicate(timeout=30)
    assert "ssp:lr=1e18, trial 1: missed 50 % accuracy, diverged" in err
    (first,) = (path for path in begun() if is_finished(path))
    before = (first / RECORDS).read_bytes()
    done = subprocess.run([*base, "--resume", out, "--json"], capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    assert "1 of 2 runs are there already" in done.stderr and "Traceback" not in done.stderr
    assert (first / RECORDS).read_bytes() == before
    told = json.loads(done.stdout)
    assert {entry["name"]: entry["reached"] for entry in told["entries"]} == {"allreduce": 1, "ssp:lr=1e18": 0}
    assert told["verdict"] == ["not a result: 1 trial each, and at least 3 are needed"] and not told["result"]
    assert "diverged" in (out / "trials.csv").read_text()
    assert len({read_manifest(path).seed for path in begun()}) == 2


def test_a_process_that_starts_nurseries_ends_them_and_itself() -> None:
    warm = Warm()
    first, second = warm.launch(), warm.launch()
    first.close()
    first.close()
    second.close()
    warm.close()
    with pytest.raises(RunFailed, match="is gone"):
        warm.launch()


@pytest.mark.parametrize(
    ("error", "raised", "said"),
    [(Terminated(15), Terminated, "stopped; "), (RunFailed("no space"), RunFailed, "")],
)
def test_whoever_stops_it_is_told_how_to_go_on(
    error: BaseException, raised: type, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    def fail(self: Train, trial: Trial) -> None:
        raise error

    monkeypatch.setattr(Train, "__call__", fail)
    out = tmp_path / "study"
    with pytest.raises(raised) as ended:
        command("compare", "digits-mlp", "--strategies", "allreduce", "--target", 0.5, "--out", out)
    message = capfd.readouterr().err + str(ended.value)
    assert f"{said}finished runs are kept; go on with: torrential compare --resume {out}" in message


@pytest.mark.parametrize(("cause", "code"), [(KeyboardInterrupt(), 130), (Terminated(15), 143)])
def test_a_signal_while_a_module_is_loaded_is_no_failure_of_the_module(
    cause: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    def fail(**how: Any) -> None:
        raise ImportError("initialization failed") from cause

    monkeypatch.setattr(entry, "app", fail)
    assert cli.carry_out() == code and capfd.readouterr().err == ""


# -- simulated --------------------------------------------------------------------------------------------------------
def test_the_same_rules_for_all(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """What is given in steps is of the first entry; the others get as many samples."""
    (tmp_path / "even.toml").write_text(CLUSTER)
    out = tmp_path / "study"
    args = ("digits-mlp", "--strategies", "allreduce,ssp:staleness=2,allreduce:batch_size=8", "--target", 0.99)
    args += ("--trials", 1, "--workers", "2,4", "--cluster", tmp_path / "even.toml", "--out", out)
    args += ("--steps", 24, "--set", "evaluate_every=8", "--servers", 2)
    command("compare", *args, "--json")
    told = json.loads(capfd.readouterr().out)
    entries = read_question(out).entries
    assert [(e.name, e.steps, e.evaluate_every) for e in entries] == [
        ("allreduce · 2 workers", 24, 8),  # of 64 samples
        ("allreduce · 4 workers", 12, 4),
        ("ssp:staleness=2 · 2 workers", 48, 16),  # of 32
        ("ssp:staleness=2 · 4 workers", 48, 16),
        ("allreduce:batch_size=8 · 2 workers", 96, 32),
        ("allreduce:batch_size=8 · 4 workers", 48, 16),
    ]
    assert told["interval"] == 512 and {entry["world"] for entry in told["entries"]} == {"sim"}
    assert [entry["servers"] for entry in told["entries"]] == [0, 0, 2, 2, 0, 0]
    assert [entry["missed"] for entry in told["entries"]] == [1] * 6
    assert (out / "report.html").stat().st_size > 1000
    before = {path: path.read_bytes() for path in out.rglob(RECORDS)}
    command("compare", *args)  # once more: nothing to do
    assert "6 of 6 runs are there already" in capfd.readouterr().err
    assert before == {path: path.read_bytes() for path in out.rglob(RECORDS)}
    message = refused("compare", *args, "--seed", 1)
    assert message == f"{out} holds another study (seed: 0 there, 1 asked); choose another --out"


@pytest.mark.parametrize("cluster", [None, '[compute]\nseconds_per_sample = "measure"\nspread = "lognormal"\n'])
def test_how_long_a_sample_takes_is_measured_once_for_a_study(
    cluster: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each run used to measure for itself, so entries differed by the noise of the machine. A study that goes on has
    the figures that it was begun with, and each run has its own on record, with which it can be repeated."""
    figures = itertools.count(1)
    asked: list[int] = []

    def measure(task: Any, batch_size: int, device: Any, threads: int) -> float:
        asked.append(batch_size)
        return 1e-5 * next(figures)

    def measured_again(*args: Any) -> float:
        pytest.fail("a run measured for itself")

    monkeypatch.setattr("torrential.study.measured.measure_seconds_per_sample", measure)
    monkeypatch.setattr("torrential.worlds.sim.world.measure_seconds_per_sample", measured_again)
    out = tmp_path / "study"
    args = ["digits-mlp", "--strategies", "allreduce,ssp,allreduce:batch_size=8", "--target", 0.99, "--steps", 2]
    where = ["--world", "sim"]
    if cluster is not None:
        (tmp_path / "mine.toml").write_text(cluster)
        where = ["--cluster", str(tmp_path / "mine.toml")]
    args = [*args, *where, "--trials", 2, "--out", out]

    def stop(self: Train, trial: Trial) -> None:
        if sum(1 for _ in out.glob(f"runs/*/{RECORDS}")) == 2:
            raise RunFailed("no space")
        train(self, trial)

    train = Train.__call__
    with monkeypatch.context() as patched, pytest.raises(RunFailed):
        patched.setattr(Train, "__call__", stop)
        command("compare", *args)
    command("compare", "--resume", out, "--json")
    streams = capfd.readouterr()
    assert asked == [32, 8]
    kept = {path.parent.name: read_manifest(path.parent).config for path in out.glob(f"runs/*/{MANIFEST}")}
    assert len(kept) == 6
    assert {(config["batch_size"], config["cluster"]["compute"]["seconds_per_sample"]) for config in kept.values()} == {
        (32, 1e-5),
        (8, 2e-5),
    }
    assert all(
        config["cluster"]["compute"].get("spread") == ("lognormal" if cluster else None) for config in kept.values()
    )
    said = "a sample takes a simulated worker 1e-05 s in batches of 32 and 2e-05 s in batches of 8, measured once"
    told = json.loads(streams.out)
    assert streams.err.count(said) == 3 and any(said in rule for rule in told["rules"])  # before, again, and after
    assert [time["seconds_per_sample"] for time in told["measured"]] == [1e-5, 2e-5]
    assert said in (out / "report.html").read_text().replace("A sample takes", "a sample takes")
    repeated = train_again(kept["ssp-2"], tmp_path / "again")
    assert repeated == [r for r in read_records(out / "runs" / "ssp-2" / RECORDS) if isinstance(r, Step | Evaluation)]


def train_again(config: dict[str, Any], out: Path) -> list[Any]:
    """The steps and evaluations of a run like the one on record."""
    like = {name: config[name] for name in ("workers", "servers", "target", "steps", "seed", "world", "cluster")}
    found = tt.train(config["task"], config["strategy"], **like, out=out, progress=False)
    return [record for record in found.history if isinstance(record, Step | Evaluation)]


def test_trials_until_it_is_decided(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """One entry takes four times as long, which the first look shows; a crash comes when all have ended."""
    (tmp_path / "even.toml").write_text(CLUSTER + '[[faults]]\nkind = "crash"\nworker = 1\nat = 900.0\n')
    args = ("digits-mlp", "--strategies", "allreduce,allreduce:slow=1:4", "--target", 0.7, "--trials", "auto")
    out = tmp_path / "study"
    command("compare", *args, "--cluster", tmp_path / "even.toml", "--out", out, "--json")
    streams = capfd.readouterr()
    told = json.loads(streams.out)
    assert streams.err.splitlines()[1:3] == [
        "2 entries, 5 to 20 trials each",
        "trials are added until it is decided which is soonest; looked at after 5, 8, 13 and 20",
    ]
    assert (told["trials"], told["looks"], told["result"]) == (5, [5, 8, 13, 20], True)
    assert told["verdict"][0].startswith("allreduce reached 70 % accuracy soonest (median ")
    assert [entry["trials"] for entry in told["entries"]] == [5, 5] and told["pairs"][0]["differs"]
    assert told["verdict"][-1] == (
        "the crash of worker 1 at 900.0 virtual s struck in none of 10 trials: all had ended before"
    )
    page = (out / "report.html").read_text()
    assert "5 trials were made per entry" in page and "looks planned after 5, 8, 13 and 20" in page
    message = refused("compare", *args[:-1], "5", "--cluster", tmp_path / "even.toml", "--out", out)
    assert "trials: 20 there, 5 asked; auto: True there, False asked" in message


def test_steps_that_are_a_large_part_of_an_epoch_count_by_what_they_take_on_average() -> None:
    """Of 1,350 samples, 64 workers with 16 each take 1,024 and then 326."""
    asked = StudyRequest(
        task="digits-mlp",
        strategies=["ssp,allreduce"],
        target=0.5,
        trials=3,
        workers=[64],
        batch_size=16,
        world="sim",
        clusters=["spot64"],
        set={"evaluate_every": "640"},
        steps=1280,
    )
    question, _ = make_question(asked, [])
    assert question.interval == 640 * 16
    assert [(entry.evaluate_every, entry.steps) for entry in question.entries] == [(640, 1280), (15, 30)]


def test_test_data_is_read_once_in_each_run_that_is_reported_and_never_to_tune(tmp_path: Path) -> None:
    (tmp_path / "even.toml").write_text(CLUSTER)
    args = ("digits-mlp", "--strategies", "allreduce,ssp", "--target", 0.9, "--trials", 1, "--tune", "lr=0.02,0.05")
    command("compare", *args, "--steps", 20, "--cluster", tmp_path / "even.toml", "--out", tmp_path / "study")
    reads = {
        kind: [
            sum(isinstance(record, Evaluation) and record.split == "test" for record in read_records(path))
            for path in (tmp_path / "study").glob(f"{kind}/*/{RECORDS}")
        ]
        for kind in ("tuning", "runs")
    }
    assert reads == {"tuning": [0] * 4, "runs": [1] * 2}


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((), "which task?"),
        (("digits",), "which strategies?"),
        (("digits", "--strategies", "allreduce"), "digits has no target of its own; give one with --target"),
        (("digits", "--strategies", "allreduce,sp", "--target", 0.9), "no strategy named 'sp'; did you mean 'ssp'?"),
        (("digits", "--strategies", "allreduce,ssp:stalenes=1", "--target", 0.9), "ssp:stalenes=1: no option named"),
        (("digits", "--strategies", "allreduce", "--target", 97), "an accuracy is between 0 and 1"),
        (
            ("digits", "--strategies", "backup", "--target", 0.9, "--workers", 1),
            "backup: a step needs at least one gradient",
        ),
        (("digits", "--strategies", "ssp", "--target", 0.9, "--workers", "2,x"), "whole numbers, as in 2,4"),
        (("digits", "--strategies", "ssp", "--target", 0.9, "--set", "slow"), "--set takes name=value"),
        (("digits", "--strategies", "ssp", "--target", 0.9, "--set", "evaluate_every=x"), "evaluate_every must be"),
        (("digits", "--strategies", "ssp", "--target", 0.9, "--set", "evaluate_every=0"), "evaluate_every must be"),
        (("digits", "--strategies", "ssp", "--target", 0.9, "--tune", "lr=0.1,fast"), "lr must be a number"),
        (("digits", "--strategies", "ssp", "--target", 0.9, "--cluster", "moon"), "no cluster named 'moon'"),
        (("digits", "--strategies", "ssp", "--target", 0.9, "--world", "moon"), "no world named 'moon'"),
        (
            ("digits", "--strategies", "ssp,bsp", "--target", 0.9, "--trials", "many"),
            "auto:N for at most N (given: 'many",
        ),
        (("digits", "--strategies", "ssp,bsp", "--target", 0.9, "--trials", "auto:x"), "(given: 'auto:x')"),
        (
            ("digits", "--strategies", "ssp,bsp", "--target", 0.9, "--trials", "0"),
            "--trials must be at least 1 (given: 0)",
        ),
        (("digits", "--strategies", "ssp", "--target", 0.9, "--trials", "auto"), "told apart, and there is one"),
        (
            ("digits", "--strategies", "ssp,bsp,backup", "--target", 0.9, "--trials", "auto:5"),
            "auto:5 cannot decide between 3 entries: the first look takes 6 trials each; use auto:6 or more",
        ),
        (("--resume", "nowhere"), "nowhere holds no study"),
        (("digits", "--resume", "nowhere", "--trials", 3), "leave out --trials"),
        (
            (
                "digits",
                "--strategies",
                "allreduce,allreduce:batch_size=26",
                "--target",
                0.9,
                "--set",
                "evaluate_every=1",
            ),
            "an evaluation every 64 samples is no whole number of steps of allreduce:batch_size=26; "
            "use --set evaluate_every=3",
        ),
    ],
)
def test_what_is_refused_before_anything_is_made(
    args: tuple[object, ...], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert words in refused("compare", *args)
    assert os.listdir() == []


def test_the_study_of_another_user_is_not_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = tmp_path / "mine.py"
    task.write_text("raise SystemExit('run all the same')")
    out = tmp_path / "study"
    open_directory(out, question(task=str(task)))
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    message = refused("compare", "--resume", out)
    assert message.startswith(f"{out} is not yours (owner: ") and "file that study.json names would be run" in message
    assert message.endswith("put the question yourself, with --out in the place of --resume")


# -- report -----------------------------------------------------------------------------------------------------------
def test_a_report_of_a_directory_of_runs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for i in range(4):
        write_run(tmp_path / f"a{i}", config("allreduce", seed=i), 4.0 + i / 10)
        write_run(tmp_path / f"s{i}", config("ssp", seed=i), 2.0 + i / 10)
    command("report", tmp_path, "--json", "--tensorboard")
    streams = capfd.readouterr()
    told = json.loads(streams.out)
    assert told["verdict"][0] == "ssp reached 90 % accuracy soonest (median 2.150 s, 4 trials)"
    assert told["report"] == str(tmp_path / "report.html") and (tmp_path / "report.html").exists()
    assert "ssp reached 90 % accuracy soonest" in streams.err and f"report: {tmp_path}" in streams.err
    assert len((tmp_path / "trials.csv").read_text().splitlines()) == 9
    assert len(list(tmp_path.glob("tensorboard/*/*tfevents*"))) == 8
    command("report", tmp_path)  # what was written beside the runs is no run


def test_nothing_to_report(tmp_path: Path) -> None:
    assert refused("report", tmp_path).startswith(f"there is no run in {tmp_path}")
    assert refused("report", tmp_path / "none").startswith("there is no directory")
    assert os.listdir(tmp_path) == []
