"""What README.md and docs/ say: the commands and snippets of a page are run, in their order, in one directory, and each
snippet by itself, as somebody who copies it would; so is every program in examples/."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from pages import LINKED, PAGES, ROOT, Block, anchors, blocks, links

from torrential.strategies import STRATEGIES
from torrential.worlds.sim.cluster import Cluster

Cli = Callable[..., subprocess.CompletedProcess[str]]

MOST_LINES = 150  # of the README
MOST_NOT_RUN, MOST_SHORTENED = 5, 37  # blocks of all pages together
NOTEBOOK = "notebook.ipynb"
EXAMPLES = {  # what each prints
    "character_transformer": [r"perplexity 1\.\d\d \(a guess has 28\)"],
    "compare_strategies": [r"allreduce +4 of 4 runs reached 90%", r"downpour +4 of 4 runs reached 90%", r"trials"],
    "gan": [r"640 steps; the mean of what is made is [01]\.\d\d from"],
    "map_reduce": [r"least squares: \[-?0\.0, 1\.0, 2\.0, 3\.0, 3\.99, 5\.0", "the same bits on one worker: True"],
    "map_reduce_clusters": [r"k_means, \d+ rounds: \[\[-?0\.0, -?0\.0\], \[8\.0", r"mixture, \d+ rounds: \[\[-?0"],
    "map_reduce_logistic": [r"\d rounds of Newton: \[-?0\.0, 0\.27, 0\.5, "],
    "own_loop": [r"allreduce: accuracy (8|9)\d\.\d%", r"ssp: accuracy (8|9)\d\.\d% after 5120 samples"],
    "own_metric": [r"R2 0\.9\d\d after"],
    "parameter_servers": ["s: server_lost", "13500 samples were trained on, 13500 were planned"],
    "resume_after_a_kill": ["resumed at step", "bit for bit: True"],
    "simulate_stragglers": [r"allreduce +8\.\d\d", r"backup +4\.\d\d"],
    "stream": [r"test accuracy 9\d\.\d% after 12000 samples"],
    "text_classification": [r"test accuracy (9\d|100)\.\d%; of the last batch \d+% was padding"],
    "train_my_model": [r"test accuracy (9\d|100)\.\d%", "the point .* is on arm 1"],
}


@pytest.mark.timeout(240)  # a page is a dozen tests in one
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_commands_and_snippets_of_a_page_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_cli: Cli
) -> None:
    monkeypatch.chdir(tmp_path)
    for block in blocks(page):
        where = f"{page.name}:{block.line}"
        if block.not_run or block.language == "text":
            continue
        if block.file:
            (tmp_path / block.file).write_text(block.code)
        elif block.language == "python":
            (script := tmp_path / "snippet.py").write_text(block.code)
            done = run_cli(script=script)
            assert done.returncode == 0, f"{where}:\n{done.stderr}"
        else:
            assert block.language == "sh", f"{where} has the language {block.language!r}; use sh, python, toml or text"
            run_commands(block, where, run_cli)


def run_commands(block: Block, where: str, run_cli: Cli) -> None:
    for words in block.commands():
        match words:
            case ["torrential", *arguments]:
                done = run_cli(*arguments, *block.shortened)
            case ["python", "-m", *arguments]:
                command = [sys.executable, "-P", "-m", *arguments]
                done = subprocess.run(command, capture_output=True, text=True, timeout=60)
            case _:
                pytest.fail(f"{where} has {words[0]}, which is neither torrential nor python -m; say why it is not run")
        assert done.returncode == 0, f"{where}: {' '.join(words)}\n{done.stdout}{done.stderr}"


def test_few_blocks_are_left_out_or_shortened() -> None:
    all_blocks = [block for page in PAGES for block in blocks(page)]
    assert len([block for block in all_blocks if block.not_run]) <= MOST_NOT_RUN
    assert len([block for block in all_blocks if block.shortened]) <= MOST_SHORTENED
    assert sum(len(block.commands()) for block in all_blocks if block.language == "sh") > 30
    assert sum(block.language == "python" for block in all_blocks) >= 8


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_files_that_a_page_shows_are_used_there(page: Path) -> None:
    shown = [block for block in blocks(page) if block.file]
    run = "".join(block.code for block in blocks(page) if not block.file and not block.not_run)
    assert [block.file for block in shown if block.file not in run] == []


# -- examples ---------------------------------------------------------------------------------------------------------
def test_every_example_is_run() -> None:
    programs = {file.stem for file in (ROOT / "examples").glob("*.py")}
    assert programs == EXAMPLES.keys()
    assert {file.name for file in (ROOT / "examples").iterdir() if file.is_file()} == {
        f"{name}.py" for name in programs
    } | {NOTEBOOK}


def test_the_notebook_runs_cell_by_cell(tmp_path: Path) -> None:
    cells = json.loads((ROOT / "examples" / NOTEBOOK).read_text())["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert len(sources) >= 3 and not any(cell.get("outputs") for cell in cells)
    program = "".join(f"exec(compile({source!r}, '<cell>', 'exec'))\n" for source in sources)  # of no file
    done = subprocess.run(
        [sys.executable, "-"], input=program, capture_output=True, text=True, timeout=100, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"allreduce: accuracy 9\d\.\d% after 4096 samples\nssp: .*\nhere: accuracy 9", done.stdout), (
        done.stdout
    )


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_does_what_it_says(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_cli: Cli) -> None:
    program = ROOT / "examples" / f"{name}.py"
    monkeypatch.chdir(tmp_path)
    done = run_cli(script=program, timeout=200, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    for said in EXAMPLES[name]:
        assert re.search(said, done.stdout), done.stdout
    source = program.read_text()
    assert ast.get_docstring(ast.parse(source)) and 20 <= len(source.splitlines()) < 80


# -- what pages are about ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        if link.startswith("https://"):
            continue
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        assert target.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link}, of {sorted(anchors(target))}"


def test_the_readme_is_short_and_everything_is_listed() -> None:
    readme, index = (ROOT / "README.md").read_text(), ROOT / "docs" / "index.md"
    assert len(readme.splitlines()) <= MOST_LINES
    listed = {(index.parent / link).resolve() for link in links(index)}
    files = [
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "docs" / "results").glob("*.md"),
        *(ROOT / "docs" / "internals").glob("*.md"),
        *(file for file in (ROOT / "examples").iterdir() if file.is_file()),
    ]
    assert set(files) - listed == {index}


def test_strategies_and_their_options_are_explained() -> None:
    page = ROOT / "docs" / "strategies.md"
    readme, text = (ROOT / "README.md").read_text(), page.read_text()
    for name, strategy in STRATEGIES.items():
        assert name in anchors(page) and f"| `{name}` |" in readme
        assert [option for option in strategy.__struct_fields__ if f"`{option}=" not in text] == []


def test_every_key_of_a_cluster_file_is_explained() -> None:
    text = (ROOT / "docs" / "simulation.md").read_text()
    assert [key for key in cluster_keys(Cluster) if f"`{key}`" not in text] == []


def cluster_keys(table: type[msgspec.Struct]) -> list[str]:
    keys = []
    for field in msgspec.structs.fields(table):
        inner = next((t for t in (field.type, *getattr(field.type, "__args__", ())) if is_table(t)), None)
        keys += cluster_keys(inner) if inner else [field.name]
    return keys


def is_table(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)
