"""What a shell offers after a tab, and that it need not wait for torch."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from torrential import completion
from torrential.config import Compression, LocalSettings, Recipe
from torrential.listeners.loggers import LOGGERS
from torrential.strategies import STRATEGIES
from torrential.worlds.sim.cluster import read_cluster

# The command as a shell calls it; says at its end whether torch was loaded.
COMMAND = """
import atexit, sys
sys.argv = ["torrential"]
atexit.register(lambda: print("torch" in sys.modules, file=sys.stderr))
from torrential.cli import main
main()
"""


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("torrential tr", ["train"]),
        ("torrential train dig", ["digits", "digits-mlp"]),
        ("torrential train ./mine", []),
        ("torrential train digits --strategy b", ["backup", "bsp"]),
        ("torrential train digits --world s", ["sim"]),
        ("torrential train digits --device c", ["cpu", "cuda"]),
        ("torrential train digits --cluster l", ["laptop"]),
        ("torrential train digits --log tensorboard,w", ["tensorboard,wandb"]),
        ("torrential train digits --set a", ["accumulate=", "algorithm=", "authority="]),
        ("torrential train digits --set tra", ["trace=", "transport="]),
        ("torrential train digits --world sim --set tra", ["trace="]),
        ("torrential train digits --strategy ssp --set st", ["stages=", "staleness="]),
        ("torrential train digits --strategy ssp --set al", []),
        ("torrential strategies do", ["downpour"]),
        (
            "torrential compare digits --strategies allreduce,s",
            ["allreduce,sandblaster", "allreduce,ssp", "allreduce,streaming"],
        ),
        ("torrential compare digits --set push", ["push_every="]),
    ],
)
def test_what_is_offered(typed: str, offered: list[str]) -> None:
    place = str(typed.count(" "))
    asked = {"_TORRENTIAL_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": place}
    ended = subprocess.run([sys.executable, "-c", COMMAND], capture_output=True, text=True, env=os.environ | asked)
    assert ended.stdout.split() == offered
    assert ended.stderr.split() == ["False"]


def test_names_are_those_that_there_are() -> None:
    assert completion.strategies("") == sorted(STRATEGIES)
    assert completion.loggers("") == sorted(LOGGERS)
    for name in completion.clusters(""):
        assert read_cluster(name)["name"] == name
    for name, kind in STRATEGIES.items():
        assert completion._own_options(completion.STRATEGIES / f"{name}.py") == set(kind.__struct_fields__)


def test_what_is_offered_after_set_is_all_that_can_be_set() -> None:
    class Typed:
        params = {"strategies": None}

    offered = {name.removesuffix("=") for name in completion.settings(Typed(), "")}  # type: ignore[arg-type]
    own = {name for kind in STRATEGIES.values() for name in kind.__struct_fields__}
    common = {*LocalSettings.__struct_fields__, *Recipe.__struct_fields__, *Compression.__struct_fields__}
    assert offered == own | common


def test_completion_can_be_installed(tmp_path: object) -> None:
    home = os.environ | {"HOME": str(tmp_path)}
    command = [
        sys.executable,
        "-c",
        COMMAND.replace('["torrential"]', '["torrential", "--install-completion", "bash"]'),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, env=home)
    assert ended.returncode == 0, ended.stderr
    script = f"source {tmp_path}/.bash_completions/torrential.sh && complete -p torrential"
    shown = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert shown.stdout == "complete -o default -F _torrential_completion torrential\n"
