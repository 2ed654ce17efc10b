"""What compressing gradients costs and brings: the time to encode, and steps a second over a slow link.

python -m benchmarks.compression --encode                          # a gradient of 25 million elements, one thread
python -m benchmarks.compression --steps --link 100mbit            # an MLP of 24 million parameters, two workers

A pass is what copying the gradient takes. Time to a target accuracy: python -m benchmarks.slowlink. Every way is run in
turns, as often as --rounds says; medians, and all that was measured.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

import torrential as tt
from benchmarks import link
from torrential.compression import int8
from torrential.compression.dgc import DeepGradientCompression
from torrential.compression.powersgd import LowRank
from torrential.compression.sparse import pack, room, wanted
from torrential.compression.topk import TopK
from torrential.records import Step

SHAPES = [(4096, 784), (4096, 4096), (1024, 4096), (256, 1024), (512, 1024)]  # of matrices: 25 million elements
RATIO, WORKERS, THREADS = 0.001, 2, 1
CPU = torch.device("cpu")
WAYS: dict[str, dict[str, Any]] = {
    "as they are": {},
    "wire=bf16": {"wire": "bf16"},
    "int8": {"compress": "int8"},
    "powersgd, rank 4": {"compress": "powersgd"},
    "topk 0.1 %": {"compress": "topk"},
    "dgc 0.1 %": {"compress": "dgc", "sparsity_warmup": 0.0},
}


# -- encoding ---------------------------------------------------------------------------------------------------------
def encoders(shapes: list[tuple[int, int]]) -> dict[str, Callable[[], object]]:
    """What is timed, by name, on a gradient of these matrices: from the gradient to the message, and back to the memory
    that the next step begins with."""
    torch.manual_seed(0)
    gradients = [torch.randn(rows * columns) for rows, columns in shapes]
    sizes = [gradient.numel() for gradient in gradients]
    flat, other = torch.cat(gradients), torch.empty(sum(sizes))
    counts = [wanted(size, RATIO) for size in sizes]
    momenta = [0.9] * len(sizes)
    sparse = {
        "topk": TopK(sizes, torch.float32, CPU),
        "dgc": DeepGradientCompression(
            sizes, torch.float32, CPU, momenta=momenta, nesterov=[False] * len(sizes), masking=True
        ),
    }
    low_rank = LowRank(shapes, 4, torch.float32, CPU, seed=0)
    taken = [0]

    def select(compressor: TopK) -> object:
        taken[0] += 1
        selected = compressor.select(list(gradients), counts, 1.0, taken[0])
        message = pack(selected, room(sum(counts), sum(sizes)), torch.float32)
        compressor.sent(selected)
        compressor.commit()
        return message

    def project() -> object:
        right = low_rank.fit(low_rank.project(list(gradients), 1.0))
        low_rank.approximate(right, list(other.split(sizes)), 1)
        low_rank.commit()
        return right

    return {
        "a pass": lambda: other.copy_(flat),
        "bf16": lambda: flat.bfloat16(),
        "int8": lambda: int8.encode(flat),
        "powersgd, rank 4": project,
        "topk": lambda: select(sparse["topk"]),
        "dgc": lambda: select(sparse["dgc"]),
    }


def time_encoding(shapes: list[tuple[int, int]], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each, in turns; the first round warms up."""
    torch.set_num_threads(THREADS)
    found: dict[str, list[float]] = {}
    made = encoders(shapes)
    for number in range(rounds + 1):
        for name, encode in made.items():
            began = time.perf_counter()
            encode()
            if number:
                found.setdefault(name, []).append(1e3 * (time.perf_counter() - began))
    return found


def show_encoding(found: dict[str, list[float]]) -> None:
    a_pass = median(found["a pass"])
    print("| | ms | passes | all |\n|---|---:|---:|---|")
    for name, took in found.items():
        print(f"| {name} | {median(took):.1f} | {median(took) / a_pass:.1f} | {' '.join(f'{ms:.1f}' for ms in took)} |")


# -- steps ------------------------------------------------------------------------------------------------------------
def time_steps(task: str | tt.Task, steps: int, rounds: int, only: str) -> dict[str, list[tuple[float, float]]]:
    """Steps a second of each way, and megabytes that a worker sends in one: between the second step and the last."""
    found: dict[str, list[tuple[float, float]]] = {}
    for _ in range(rounds):
        for name, options in WAYS.items():
            if only not in name:
                continue
            with tempfile.TemporaryDirectory(prefix="benchmark-") as directory:
                os.environ["XDG_CACHE_HOME"] = directory  # what messages cost on this link is of no use elsewhere
                count = steps if options.get("compress") in ("topk", "dgc", "powersgd") else min(steps, 4)
                made = tt.train(
                    task, workers=WORKERS, steps=count, out=Path(directory) / "run", progress=False, device="cpu",
                    transport="tcp", algorithm="direct", threads=THREADS, test=False, evaluate_every=1 << 20, **options,
                )  # fmt: skip
            mine = [record for record in made.history if isinstance(record, Step) and record.worker == 0]
            first, last = mine[min(1, len(mine) - 2)], mine[-1]
            taken = last.step - first.step
            sent = (last.bytes_sent - first.bytes_sent) / taken / 1e6
            found.setdefault(name, []).append((taken / (last.time - first.time), sent))
            print(name, found[name][-1], flush=True)
    return found


def show_steps(found: dict[str, list[tuple[float, float]]]) -> None:
    plain = median(rate for rate, _ in found["as they are"]) if "as they are" in found else None
    print("| | steps/s | times as many | MB a worker sends in a step | all |\n|---|---:|---:|---:|---|")
    for name, runs in found.items():
        rate = median(rate for rate, _ in runs)
        times = f"{rate / plain:.1f}" if plain else ""
        each = " ".join(f"{one:.3g}" for one, _ in runs)
        print(f"| {name} | {rate:.3g} | {times} | {median(sent for _, sent in runs):.3g} | {each} |")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encode", action="store_true")
    parser.add_argument("--steps", action="store_true")
    parser.add_argument("--link", help="the rate of the loopback that workers talk over, as in 100mbit; needs root")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--count", type=int, default=40, help="steps of the ways that send little; others take 4")
    parser.add_argument("--only", default="", help="ways in whose name this is found")
    args = parser.parse_args(arguments)
    if args.encode:
        show_encoding(time_encoding(SHAPES, args.rounds))
    if args.steps:
        if args.link:
            link.enter(args.link)
        show_steps(time_steps(f"{Path(__file__).parent / 'models.py'}:mlp", args.count, args.rounds, args.only))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
