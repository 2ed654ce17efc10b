"""The workloads of the benchmarks in a training loop of their own: what `loop` in benchmarks/sync.py runs.

torrential launch benchmarks/own_loop.py --workers 2 --steps 60 -- mlp sgd 32
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

import torrential as tt

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.models import WORKLOADS, spec

name, kind, batch = sys.argv[1], sys.argv[2], int(sys.argv[3])
torch.manual_seed(0)
workload = WORKLOADS[name]
model = workload.build()
optimizer = spec(kind).kind(model.parameters(), lr=spec(kind).lr, **spec(kind).options)  # type: ignore[call-arg]
loader = DataLoader(workload.data(workload.samples), batch_size=batch, shuffle=True)
run = tt.join()
model, optimizer, loader = run.prepare(model, optimizer, loader)
for _ in run.epochs(100_000):
    for inputs, targets in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
