"""All-reduce of 25 MB between two hosts of benchmarks/hosts.py, beside the wire's own time and a simulation.

python -m benchmarks.host_link        needs root

    two workers train a vector of 25 MB with next to no arithmetic; told is the median time of a step
    at 200 Mb/s       in clear and in TLS, beside what the link takes for as many bytes each way, and beside the same
                      run in the simulator, told nothing but the rate
    as fast as it is  in clear and in TLS: the ratio of the rates
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
from torch.nn import functional
from torch.utils.data import TensorDataset

import torrential as tt
from benchmarks.host_runs import SECONDS, HostsRun
from benchmarks.hosts import cluster
from torrential.bench.job import Vector
from torrential.records import Record, Step, read_records

NBYTES = 25_000_000
RATE = 200_000_000  # bits a second
STEPS = 12
ALGORITHM = "ring"
GOALS = {"wire": 1.2, "simulator": 0.15, "tls": 0.3}


def vector() -> tt.Task:
    data = TensorDataset(torch.zeros(2 * STEPS, 1), torch.zeros(2 * STEPS, 1))
    return tt.Task(
        model=partial(Vector, NBYTES // 4),
        loss=functional.mse_loss,
        train=data,
        validation=data,
        test=data,
        optimizer=tt.optimizer("sgd", lr=1e-3),
        batch_size=1,
        name="vector",
    )


def words() -> list[object]:
    task = f"{Path(__file__).resolve()}:vector"
    settings = f"algorithm={ALGORITHM}", "threads=1", "test=false", f"evaluate_every={10 * STEPS}"
    return [task, "--workers", 2, "--steps", STEPS, *(w for setting in settings for w in ("--set", setting))]


def step_seconds(records: list[Record]) -> float:
    """The median of a step; the first, in which connections are made, is left out."""
    steps = [r for r in records if isinstance(r, Step) and r.worker == 0][1:]
    return median((after.time - before.time) / (after.step - before.step) for before, after in pairwise(steps))


def real(root: Path, security: str, rate: int | None) -> float:
    directory = Path(tempfile.mkdtemp(dir=root))
    with cluster(2, directory) as hosts:
        for host in hosts:
            if rate is not None:
                host.limit(rate)
        run = HostsRun(hosts, directory / "run", *words(), "--set", f"security={security}")
        try:
            for code, said in run.wait():
                if code:
                    raise SystemExit(said)
        finally:
            run.close()
        return step_seconds(run.records())


def simulated(root: Path, rate: int) -> float:
    described = root / "cluster.toml"
    described.write_text(f"[network]\nbandwidth = {rate / 8}\n")
    out = root / "simulated"
    program = [
        sys.executable,
        "-m",
        "torrential",
        "train",
        *words(),
        "--world",
        "sim",
        "--cluster",
        described,
        "--out",
        out,
    ]
    done = subprocess.run(list(map(str, program)), capture_output=True, text=True, timeout=SECONDS)
    if done.returncode:
        raise SystemExit(done.stderr)
    return step_seconds(read_records(out / "records.jsonl"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="host-link-") as directory:
        root = Path(directory)
        wire, predicted = 8 * NBYTES / RATE, simulated(root, RATE)
        for security in ("token", "tls"):
            took = real(root, security, RATE)
            off = abs(predicted / took - 1)
            print(
                f"200 Mb/s, {security:5}: {took:.3f} s, {took / wire:.3f} of the wire's own {wire:.3f} s (goal: "
                f"{GOALS['wire']}); simulated {predicted:.3f} s, off by {off:.1%} (goal: {GOALS['simulator']:.0%})",
                flush=True,
            )
        plain, secure = real(root, "token", None), real(root, "tls", None)
        print(
            f"no limit: {plain:.4f} s in clear, {secure:.4f} s in TLS: {plain / secure:.2f} of the rate (goal: "
            f"{GOALS['tls']})"
        )


if __name__ == "__main__":
    main()
