"""Files of runs and studies that somebody else has written: whatever is in them, a reader ends, and says what is wrong
in a line; what it prints commands no terminal."""

from __future__ import annotations

import ast
import io
import json
import os
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_up import Unseen, config, fake, question, write_run
from studies import make_entry, make_study

from torrential import checkpoint as checkpoints
from torrential.comm import costs
from torrential.errors import BadInput, CheckpointDamaged, TorrentialError
from torrential.files import DEEPEST_JSON, LARGEST_JSON, read_json
from torrential.records import MANIFEST, RECORDS, read_manifest, read_records, replace_file, trim_records
from torrential.reporting import page
from torrential.reporting.page import write_report
from torrential.study.conduct import conduct
from torrential.study.directory import open_directory, read_question
from torrential.study.read import read_study
from torrential.study.results import STUDY
from torrential.study.show import show, to_json, write_csv
from torrential.study.tensorboard import write_events
from torrential.study.verdict import judge
from torrential.terminal import Terminal, printable, printable_json

PACKAGE = Path(__file__).parents[1] / "torrential"
EVIL = "\x1b]0;evil\x07\x9b31m\u202eabc\r"  # a title, red, from right to left, back to the start of the line
COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "plotly_script", lambda: "")  # five megabytes, and nothing of a study in it
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(scope="module")
def good_study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("good") / "study"
    what = question(tune={"lr": ["0.1", "0.3"]})
    open_directory(place, what)
    conduct(what, place, fake, Unseen())
    return place


@pytest.fixture
def study(good_study: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good_study, tmp_path / "study"))


def tell(directory: Path) -> str:
    """All that `report` writes, and what it prints."""
    found = read_study(directory)
    out, verdict = io.StringIO(), judge(found)
    show(found, verdict, Terminal(file=out, width=100))
    write_report(found, directory / "report.html")
    write_csv(found)
    write_events(found)
    return out.getvalue() + printable_json(to_json(found, verdict, None))


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    """Change the JSON object of a file, or the first of its lines."""
    first, *rest = path.read_text().split("\n") if path.name == RECORDS else [path.read_text()]
    path.write_text("\n".join([json.dumps(change(json.loads(first))), *rest]))


# -- kinds of files ---------------------------------------------------------------------------------------------------
def pipe(path: Path) -> None:
    os.mkfifo(path)


def directory(path: Path) -> None:
    path.mkdir()


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def endless(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(1 << 40)  # takes no room on the disk


READERS: dict[str, Callable[[Path], Any]] = {
    MANIFEST: lambda place: read_manifest(place),
    RECORDS: lambda place: read_records(place / RECORDS),
    STUDY: lambda place: read_question(place),
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("make", [pipe, directory, device, endless])
def test_what_is_no_file_is_refused(tmp_path: Path, name: str, make: Callable[[Path], None]) -> None:
    make(tmp_path / name)
    with pytest.raises(BadInput, match=rf"{name} .*(no regular file|more than 16,777,216 bytes|is no record)"):
        READERS[name](tmp_path)


@pytest.mark.parametrize("make", [pipe, directory, device])
def test_nor_is_it_a_checkpoint_or_a_table_of_costs(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "costs.json")
    assert costs.load(tmp_path / "costs.json") is None
    make(tmp_path / "state.json")
    with pytest.raises(CheckpointDamaged, match="no regular file"):
        checkpoints.load(tmp_path)
    make(tmp_path / RECORDS)
    with pytest.raises(BadInput, match="no regular file"):
        trim_records(tmp_path / RECORDS, 0)


@pytest.mark.parametrize("make", [pipe, directory, device, endless])
@pytest.mark.parametrize("name", [MANIFEST, RECORDS])
def test_a_run_with_such_a_file_is_left_out(study: Path, name: str, make: Callable[[Path], None]) -> None:
    path = study / "runs" / "ssp-1" / name
    path.unlink()
    make(path)
    assert str(path) in tell(study)
    assert [len(entry.runs) for entry in read_study(study).entries] == [3, 2]


def test_nothing_that_lies_in_the_way_is_written_through(tmp_path: Path) -> None:
    (tmp_path / "precious").write_bytes(b"mine")
    (tmp_path / f".report.html.tmp-{os.getpid()}").symlink_to(tmp_path / "precious")
    replace_file(tmp_path / "report.html", b"new")
    assert (tmp_path / "precious").read_bytes() == b"mine" and (tmp_path / "report.html").read_bytes() == b"new"


# -- content ----------------------------------------------------------------------------------------------------------
def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


@pytest.mark.parametrize("depth", [DEEPEST_JSON + 1, 900, 20_000])
def test_json_nested_too_deeply_is_damaged(tmp_path: Path, depth: int) -> None:
    write_run(tmp_path / "run", config(), 1.0)
    for name in (MANIFEST, STUDY):
        (tmp_path / "run" / name).write_text(f'{{"format": 1, "config": {{"options": {nested(depth)}}}}}')
    for read in (read_manifest, read_question):
        with pytest.raises(BadInput, match=r"is damaged .*nested"):
            read(tmp_path / "run")
    (tmp_path / "good").write_text(nested(DEEPEST_JSON))
    assert read_json(tmp_path / "good")


def test_whole_numbers_have_64_bits(tmp_path: Path) -> None:
    for number in (10**400, -(10**20)):
        (tmp_path / MANIFEST).write_text(f'{{"format": 1, "hardware": {{"memory": {number}}}}}')
        with pytest.raises(BadInput, match=r"is damaged .*64 bits"):
            read_manifest(tmp_path)


def test_a_record_nested_too_deeply_is_none(study: Path) -> None:
    path = study / "runs" / "ssp-1" / RECORDS
    path.write_text(f'{{"kind":"event","event":"x","more":{nested(20_000)},"time":0}}\n' + path.read_text())
    assert f"line 1 of {path} is no record" in tell(study)


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_bytes(b" " * LARGEST_JSON + b"{}")
    with pytest.raises(BadInput, match="it has more than 16,777,216 bytes"):
        read_manifest(tmp_path)


BAD_NUMBERS = [
    ("worker", 10**15),
    ("worker", 150_000_000),
    ("worker", -1),
    ("samples", 10**400),
    ("time", "nan"),
    ("time", "inf"),
    ("time", 1e300),
    ("compute", "-inf"),
    ("bytes_sent", 2**64),
    ("staleness", {"1": 2**63}),
    ("staleness", {"-1": 1}),
]


@pytest.mark.parametrize(("name", "value"), BAD_NUMBERS)
def test_numbers_that_no_run_has_are_no_records(study: Path, name: str, value: Any) -> None:
    path = study / "runs" / "ssp-1" / RECORDS
    edit(path, lambda record: record | {name: value})
    assert f"line 1 of {path} is no record" in tell(study)


def test_a_worker_of_a_high_rank_costs_little(study: Path) -> None:
    from torrential.reporting import series

    path = study / "runs" / "ssp-1" / RECORDS
    edit(path, lambda record: record | {"worker": (1 << 20) - 1})
    run = next(run for entry in read_study(study).entries for run in entry.runs if run.directory.name == "ssp-1")
    work = series.work(run)
    assert set(series.slowness(work)) <= {0, 1, (1 << 20) - 1}
    assert series.activity(work, bins=10).compute.shape == (64, 10)
    tell(study)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda text: text.replace('"trials": 3', '"trials": 1000000000000'), "more than 100,000"),
        (lambda text: text.replace('"trials": 3', '"trials": -1'), "fewer than one run"),
        (lambda text: text.replace('"tune_trials": 1', '"tune_trials": 1000000000000'), "more than 100,000"),
        (lambda text: text.replace('"lr": [', '"many": [' + '"x",' * 99_999 + '"y"], "lr": ['), "more than 100,000"),
        (lambda text: text.replace('"slug": "ssp"', '"slug": "../../precious"'), r"names a directory '\.\./\.\./prec"),
        (lambda text: text.replace('"slug": "ssp"', '"slug": ".."'), r"names a directory '\.\.'"),
        (lambda text: text.replace('"slug": "ssp"', f'"slug": "{"s" * 300}"'), "names a directory 'sss"),
        (lambda text: text.replace('"workers": 2', '"workers": 1000000000000'), "Expected `int` <= 1048576"),
        (lambda text: text.replace('"interval": null', '"interval": 1' + "0" * 400), "64 bits"),
        (lambda text: text.replace('"interval": null', '"interval": 0'), "Expected `int` >= 1"),
    ],
)
def test_a_study_asks_for_a_number_of_runs_in_its_directory(
    study: Path, change: Callable[[str], str], says: str
) -> None:
    text = (study / STUDY).read_text()
    assert change(text) != text
    (study / STUDY).write_text(change(text))
    with pytest.raises(BadInput, match=says):
        read_question(study)
    assert len(read_study(study).entries) == 2  # what was run is shown all the same


def test_values_too_large_for_sums_and_times_of_zero_are_told(tmp_path: Path) -> None:
    for i in range(3):
        for name in ("allreduce", "ssp"):
            path = tmp_path / f"{name}-{i}"
            write_run(path, config(name, seed=i), [0.0, 5e-324, 1.0][i], value=1e308)
            text = (path / RECORDS).read_text()
            (path / RECORDS).write_text(text.replace('"value":0.8', '"value":-1e308'))
    assert '"mean":1e308' in tell(tmp_path)


# -- a small fuzzer ---------------------------------------------------------------------------------------------------
HOSTILE = [
    *(10**15, -1, 0, 2**64, 10**400, 1e308, -1e308, 5e-324, True, None, "", "nan", "inf", "x" * 10_000),
    *(EVIL, "a\nb", "../..", "\0", [], {}, [[]], {"": None}, {"a": {"b": [1, {}]}}, "sim", "nosuch"),
]


def places(tree: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    children = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [here, *(place for name, child in children for place in places(child, (*here, name)))]


def spoil(tree: Any, draw: random.Random) -> Any:
    """The tree with one value in another's place."""
    *way, last = ("root", *draw.choice(places(tree)))
    whole = node = {"root": tree}
    for name in way:
        node = node[name]
    node[last] = json.loads(json.dumps(draw.choice(HOSTILE)))
    return whole["root"]


@pytest.mark.parametrize("seed", range(12))
def test_spoilt_files_are_reported_on_or_refused_in_a_line(study: Path, tmp_path: Path, seed: int) -> None:
    """Each seed spoils a few values of a study or of its bare runs, several times over; a bug is any other error."""
    draw, told = random.Random(seed), 0
    for number in range(6):
        copy = tmp_path / f"copy-{number}"
        shutil.copytree(study, copy)
        if seed % 2:
            (copy / STUDY).unlink()
        files = sorted(copy.rglob("*.json*"))
        for path in draw.sample(files, draw.choice([1, 2, len(files)])):
            edit(path, lambda tree: spoil(tree, draw))
        try:
            assert not COMMANDS.search(tell(copy / "runs" if seed % 2 else copy))
            told += 1
        except TorrentialError as error:
            assert "\n" not in printable(str(error)).replace("a\nb", "")
        shutil.rmtree(copy)
    assert told >= 1  # so it is not all refused at once


# -- the terminal -----------------------------------------------------------------------------------------------------
def test_text_from_files_commands_no_terminal() -> None:
    from rich.table import Table
    from rich.text import Text

    out = io.StringIO()
    console = Terminal(file=out, force_terminal=True, color_system="standard", width=200)
    table = Table(title=Text(EVIL))
    table.add_column(EVIL)
    table.add_row(Text(EVIL, style="bold red"))
    console.print(EVIL, table, Text(EVIL), highlight=False, soft_wrap=True)
    console.print(f"[red]error:[/red] {EVIL}", soft_wrap=True)
    said = out.getvalue()
    assert "\x1b[31merror:" in said and r"\x1b]0;evil" in said and r"\x9b31m\u202eabc" in said
    assert not COMMANDS.search(re.sub(r"\x1b\[[\d;]*m", "", said))  # but for our own colours


def test_the_table_of_runs_commands_no_terminal(tmp_path: Path) -> None:
    entry = replace(make_entry("allreduce", trials=1), name=EVIL)
    text = write_csv(make_study([entry], directory=tmp_path)).read_text()
    assert r"\x1b]0;evil" in text and not COMMANDS.search(text)


def test_what_is_printable() -> None:
    assert printable("plain ± text – 数字 😀\n\tindented") == "plain ± text – 数字 😀\n\tindented"
    assert printable("a\x1b[2Jb\x00\x7f\x85\u2066\udcff") == r"a\x1b[2Jb\x00\x7f\x85\u2066\udcff"
    value = {"name": EVIL + "\x7f"}
    text = printable_json(json.dumps(value, ensure_ascii=False))
    assert json.loads(text) == value and not COMMANDS.search(text)


def test_names_of_tasks_strategies_events_and_directories_are_written_out(study: Path) -> None:
    for path in study.rglob(MANIFEST):
        edit(path, lambda tree: tree | {"config": tree["config"] | {"task": EVIL, "strategy": EVIL}})
    (study / STUDY).unlink()
    (study / "runs" / "ssp-1").rename(study / "runs" / f"ssp-{EVIL}")
    said = tell(study / "runs")
    assert not COMMANDS.search(said)
    assert r"\x1b]0;evil" in said and r"\u001b]0;evil" in said  # in the table, and in the JSON


def test_a_directory_whose_name_is_no_text_is_left_out(study: Path) -> None:
    (study / STUDY).unlink()
    os.rename(study / "runs" / "ssp-1", os.fsencode(study / "runs") + b"/ssp-\xff")
    assert r"runs/ssp-\udcff is not UTF-8; rename it" in tell(study / "runs")


def test_an_argument_that_is_no_text_is_named(run_cli: Callable[..., Any], tmp_path: Path) -> None:
    done = run_cli("train", "digits", "--out", os.fsdecode(os.fsencode(tmp_path) + b"/x\xff"))
    assert done.returncode == 2 and done.stderr.startswith("error: ") and len(done.stderr.splitlines()) == 1
    assert r"/x\udcff is not UTF-8; give another name" in done.stderr


def test_only_one_place_makes_consoles() -> None:
    """rich's own obeys whatever it prints."""
    for path in PACKAGE.rglob("*.py"):
        made = [
            f"{path}:{node.lineno}"
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Console"
        ]
        assert made == []
