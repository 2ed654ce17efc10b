"""How long a report of many long runs takes, and how large its file is.

python -m benchmarks.report --runs 20 --records 100000

The runs are made up: step records of 8 workers with staleness, an evaluation for every 500 of them, a death and a join.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random

import msgspec

from torrential.config import LocalSettings, RunConfig
from torrential.records import (
    Evaluation,
    Event,
    Manifest,
    Record,
    Step,
    Summary,
    describe_machine,
    encode,
    write_manifest,
)
from torrential.reporting.page import write_report
from torrential.study.read import read_study

STRATEGIES = ("allreduce", "bsp", "ssp", "downpour")
WORKERS = 8
TARGET = 0.95


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--records", type=int, default=100_000, help="of each run")
    parser.add_argument("--keep", type=Path, help="directory for the runs and the report; by default a temporary one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = options.keep or Path(temporary)
        for number in range(options.runs):
            make_run(directory / f"run-{number:03}", STRATEGIES[number % len(STRATEGIES)], number, options.records)
        written = sum(file.stat().st_size for file in directory.glob("*/records.jsonl"))
        start = clocks()
        study = read_study(directory)
        read = clocks()
        write_report(study, directory / "report.html")
        end = clocks()
        size = (directory / "report.html").stat().st_size
    found = {
        "runs": options.runs,
        "records": options.runs * options.records,
        "records_megabytes": round(written / 1e6, 1),
        "read_seconds": round(read[0] - start[0], 2),
        "read_cpu_seconds": round(read[1] - start[1], 2),
        "write_seconds": round(end[0] - read[0], 2),
        "write_cpu_seconds": round(end[1] - read[1], 2),
        "report_megabytes": round(size / 1e6, 2),
        "peak_memory_megabytes": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3),
    }
    print(json.dumps(found))


def clocks() -> tuple[float, float]:
    """The wall's, and this process's own, which a busy machine disturbs less."""
    return time.perf_counter(), time.process_time()


def make_run(directory: Path, strategy: str, seed: int, count: int) -> None:
    directory.mkdir(parents=True)
    versions, hardware = describe_machine()
    config = RunConfig(
        task="digits", source="digits", strategy=strategy, options={}, world="local", workers=WORKERS, servers=1,
        epochs=20, steps=None, target=TARGET, samples=1350, batch_size=16, samples_per_step=16 * WORKERS, lr=0.05,
        optimizer={}, seed=seed, device="cpu", settings=LocalSettings(),
    )  # fmt: skip
    manifest = Manifest(
        torrential="0.1.0", config=msgspec.to_builtins(config), versions=versions, hardware=hardware, seed=seed,
        created="2026-01-01T00:00:00+00:00", command=["torrential", "train", "digits", "--seed", str(seed)],
    )  # fmt: skip
    write_manifest(directory, manifest)
    with open(directory / "records.jsonl", "wb") as file:
        file.writelines(encode(record) + b"\n" for record in records(strategy, seed, count))


def records(strategy: str, seed: int, count: int) -> list[Record]:
    random, counts = Random(seed), [Counter[int]() for _ in range(WORKERS)]
    made: list[Record] = []
    reached: float | None = None
    for i in range(count):
        worker, now = i % WORKERS, 0.2 * (1 + i // WORKERS)
        if strategy != "allreduce":
            counts[worker][min(20, int(random.expovariate(0.3)))] += 1
        compute, communicate = 0.2 * random.uniform(0.5, 0.8), 0.2 * random.uniform(0.05, 0.1)
        made.append(
            Step(worker=worker, step=i, epoch=i // 85, samples=16 * i, loss=random.random(), time=now,
                 compute=compute, communicate=communicate, wait=0.2 - compute - communicate, bytes_sent=1000 * i,
                 staleness=dict(counts[worker]))
        )  # fmt: skip
        if i % 500 == 499:
            value = 0.99 - 0.89 * 2.0 ** (-8 * i / count) + random.gauss(0, 0.005)
            reached = now if reached is None and value >= TARGET else reached
            made.append(
                Evaluation(split="validation", step=i, epoch=i // 85, samples=16 * i, time=now, value=value, loss=0.1)
            )
    end = 0.2 * (1 + count // WORKERS)
    made.append(Event(event="worker_lost", time=end / 3, worker=1))
    made.append(Event(event="worker_joined", time=end / 2, worker=1))
    made.append(
        Summary(task="digits", strategy=strategy, world="local", workers=WORKERS, servers=1, seed=seed, steps=count,
                samples=16 * count, seconds=end, metric="accuracy", value=0.98, target=TARGET,
                reached=reached is not None, time_to_target=reached, bytes_sent=1000 * count, staleness_mean=3.0,
                staleness_max=20, events=2, out="")
    )  # fmt: skip
    return made


if __name__ == "__main__":
    main()
