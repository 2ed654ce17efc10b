"""What recomputation costs: seconds of a step of a deep MLP, plain and recomputed, and the bytes that autograd keeps.

    python -m benchmarks.recompute --depth 256 --width 384 --batch 320

Both are measured in turns, in one process with one thread, in the processor's time, in which other processes do not
count; medians of all rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
from torch import nn

from torrential.compute.recompute import chain_of, follow, rows_of
from torrential.compute.segments import Chain, LayerBytes, Plan, halves_plan, peak_bytes, recomputed, square_root_plan
from torrential.worlds.local.nursery import keep_freed_memory


def deep_mlp(depth: int, width: int) -> nn.Sequential:
    """So many linear layers of one width, each with a ReLU."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth)))


def kept_plan(chain: Chain) -> Plan:
    """Nothing is computed again."""
    return tuple(range(chain.layers))


PLANS = {"none": kept_plan, "sqrt": square_root_plan, "recursive": halves_plan}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("depth", 256), ("width", 384), ("batch", 320), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(1)
    inputs, models, plans = torch.randn(args.batch, args.width), {}, {}
    for mode, planner in PLANS.items():
        models[mode] = deep_mlp(args.depth, args.width)
        rows = rows_of(models[mode])
        chain = chain_of(rows)
        plans[mode] = planner(chain)
        follow(rows, chain, plans[mode])
    seconds: dict[str, list[float]] = {mode: [] for mode in models}
    for _ in range(args.rounds + 1):
        for mode, model in models.items():
            began = time.process_time()
            model(inputs).sum().backward()
            seconds[mode].append(time.process_time() - began)
    kept = [LayerBytes(inputs.nbytes, inputs.nbytes * (place % 2)) for place in range(2 * args.depth)]
    plain = statistics.median(seconds["none"][1:])
    for mode, times in seconds.items():
        found = statistics.median(times[1:])
        again, peak = recomputed(plans[mode]), peak_bytes(plans[mode], kept)
        about = {"seconds": found, "times plain": found / plain, "layers again": again, "planned MB": peak / 1e6}
        print(json.dumps({"recompute": mode} | {name: round(value, 4) for name, value in about.items()}))


if __name__ == "__main__":
    main()
