"""Regression in float64 with RMSprop, counting steps instead of epochs."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torrential as tt  # tt

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--shuffle", action="store_true")
args = parser.parse_args()

torch.manual_seed(0)
inputs = torch.randn(128, 5, dtype=torch.float64)
targets = inputs @ torch.tensor([1.0, -2.0, 0.5, 0.0, 3.0], dtype=torch.float64)
loader = DataLoader(TensorDataset(inputs, targets), batch_size=args.batch, shuffle=args.shuffle)
model = nn.Linear(5, 1).double()
optimizer = torch.optim.RMSprop(model.parameters(), lr=0.05)
run = tt.join()  # tt
model, optimizer, loader = run.prepare(model, optimizer, loader)  # tt

step = 0
while step < 20:
    for x, y in loader:
        model.zero_grad()
        loss = (model(x).squeeze(1) - y).abs().mean()
        loss.backward()
        optimizer.step()
        step += 1
        if step == 20:
            break
run.report(error=(model(inputs).squeeze(1) - targets).abs().mean().item())  # tt
