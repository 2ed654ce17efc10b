"""Samples per second of torrential and DDP from 1 to 16 workers, one thread each, in one table.

python -m benchmarks.scaling OUT --workers 1,2,4,8,16 --steps 40 --seconds 480

Rounds go on as long as another one fits into --seconds; the first is always finished. After every measurement what
is known so far is written to OUT/scaling.json and OUT/scaling.md.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.sync import Options, Outcome, describe, machine, measure, ratio

CNN_STEPS = 8  # steps of the small CNN for one of the MLP: about as long
Results = dict[tuple[str, int], dict[str, list[Outcome]]]  # by model and workers, then by contender


def markdown(results: Results, names: list[str], host: dict[str, Any], command: str) -> str:
    """One line per model and number of workers; the last column compares the first contender with the second."""
    heads = ["model", "workers", *names, *([f"{names[0]} / {names[1]}"] if len(names) > 1 else [])]
    lines = [" | ".join(heads), " | ".join(["---", *["---:"] * (len(heads) - 1)])]
    for (model, workers), by_name in results.items():
        cells = [f"{median(o.rate for o in by_name[n]):,.0f}" if by_name[n] else "" for n in names]
        if len(names) > 1:
            compared = ratio(by_name[names[0]], by_name[names[1]])
            cells.append("" if compared is None else f"{compared:.2f}×")
        lines.append(" | ".join([model, str(workers), *cells]))
    rounds = max(len(o) for by_name in results.values() for o in by_name.values())
    about = f"Samples/s, one thread per worker, median of {rounds} interleaved rounds. {describe(host)}."
    return "\n".join([about, "", *(f"| {line} |" for line in lines), "", f"    {command}", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="directory for scaling.json and scaling.md")
    parser.add_argument("--models", default="mlp,cnn")
    parser.add_argument("--workers", default="1,2,4,8,16")
    parser.add_argument("--contenders", default="ours,ddp")
    parser.add_argument("--steps", type=int, default=40, help=f"of the MLP; the CNN takes {CNN_STEPS} times as many")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=480.0, help="for everything")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    names, host = given.contenders.split(","), machine()
    counts = [int(count) for count in given.workers.split(",")]
    results: Results = {
        (model, count): {name: [] for name in names} for model in given.models.split(",") for count in counts
    }
    command = f"python -m benchmarks.scaling {given.out} --workers {given.workers} --steps {given.steps}"
    print(describe(host), flush=True)
    began, longest = time.monotonic(), 0.0
    for number in range(given.rounds):
        round_began = time.monotonic()
        if number and round_began - began + longest > given.seconds:
            break
        for (model, count), by_name in results.items():
            steps = given.steps * (CNN_STEPS if model == "cnn" else 1)
            for name in names if number % 2 == 0 else reversed(names):
                outcome = measure(name, Options(model, count, steps))
                by_name[name].append(outcome)
                at = time.monotonic() - began
                print(f"{at:4.0f} s  {model} {count:2} {name:10} {outcome.rate:9,.0f} samples/s", flush=True)
                rows = [
                    {"model": m, "workers": c, **{n: [asdict(o) for o in outcomes] for n, outcomes in by.items()}}
                    for (m, c), by in results.items()
                ]
                (given.out / "scaling.json").write_text(json.dumps({"machine": host, "results": rows}, indent=2) + "\n")
                (given.out / "scaling.md").write_text(markdown(results, names, host, command))
        longest = max(longest, time.monotonic() - round_began)
    print((given.out / "scaling.md").read_text())


if __name__ == "__main__":
    main()
