"""The slow link of the benchmarks: entered by a process of its own, and gone with it; or a clear word why not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.sync import Outcome, Overlap, overlap

ROOT = Path(__file__).parents[1]
ENTER = """
import os, subprocess
from benchmarks import link
link.enter("50mbit")
print(os.readlink("/proc/self/ns/net"))
print(subprocess.run(["tc", "qdisc", "show", "dev", "lo"], capture_output=True, text=True).stdout)
"""


def python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=os.environ | env, capture_output=True, text=True, timeout=30
    )


def test_a_link_is_of_the_process_that_enters_it_alone() -> None:
    before = os.readlink("/proc/self/ns/net")
    done = python(ENTER)
    if done.returncode:  # not everybody may: then it says so, and how to
        assert done.stderr.startswith("--link needs") and done.stdout == ""
    else:
        entered, shaped = done.stdout.splitlines()[:2]
        assert entered != before and " tbf " in shaped and "rate 50Mbit" in shaped
    assert os.readlink("/proc/self/ns/net") == before


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("link.ctypes.CDLL = lambda *_, **__: type('Libc', (), {'unshare': lambda *_: -1})", "run it as root"),
        ("link.shutil.which = lambda tool: None", "needs ip and tc, which this machine has not; install iproute2"),
    ],
    ids=["privileges", "tools"],
)
def test_what_is_missing_is_named(change: str, said: str) -> None:
    done = python(f"from benchmarks import link\nlink.shutil.which = str\n{change}\nlink.enter('50mbit')")
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("--link needs") and said in done.stderr


def test_what_overlap_gains() -> None:
    """64 samples a step: 0.5 s instead of 0.8, of which 0.4 are communication."""
    shares = {"compute": 0.5, "communicate": 0.1, "wait": 0.4}
    early, late = Outcome(128.0, 10, 1.0, None, None), Outcome(80.0, 10, 1.0, None, None, shares)
    assert overlap([early] * 3, [late] * 3, 64) == Overlap(0.5, 0.8, 0.4, pytest.approx(0.75))
