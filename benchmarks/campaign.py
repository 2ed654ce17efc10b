"""A campaign: many disturbed runs, one after the other, each drawn from a seed, and what was wrong with them."""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

Disturb = Callable[[int, Path, random.Random], list[str]]
"""Carries out one run, by its number, in a directory, with draws of its own; says what is wrong afterwards."""


def campaign(about: str, name: str, option: str, well: str, prepare: Callable[[Path], Disturb]) -> None:
    """A command that makes as many runs as `option` says, 30 by default, and ends with 1 if something was wrong, naming
    the directory that is kept then. `name`: what the directory begins with; `well`: said of runs with nothing wrong."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(f"--{option}", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    runs: int = getattr(options, option)
    chance, root = random.Random(options.seed), Path(tempfile.mkdtemp(prefix=f"{name}-"))
    disturb = prepare(root)
    wrong = sum(bool(disturb(number, root, chance)) for number in range(1, runs + 1))
    print(f"{runs - wrong} of {runs} runs {well}")
    if wrong:
        sys.exit(f"see {root}")
    shutil.rmtree(root)
