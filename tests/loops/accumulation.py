"""Gradient accumulation: one step for every two batches."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import torrential as tt  # tt

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--shuffle", action="store_true")
args = parser.parse_args()

EVERY = 2
torch.manual_seed(0)
inputs, labels = torch.randn(128, 6), torch.randint(3, (128,))
loader = DataLoader(TensorDataset(inputs, labels), batch_size=args.batch, shuffle=args.shuffle)
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
run = tt.join()  # tt
model, optimizer, loader = run.prepare(model, optimizer, loader)  # tt

for _ in run.epochs(2):  # tt: for _ in range(2):
    optimizer.zero_grad()
    for number, (x, y) in enumerate(loader, start=1):
        loss = F.cross_entropy(model(x), y) / EVERY
        loss.backward()
        if number % EVERY == 0:
            optimizer.step()
            optimizer.zero_grad()
    run.report(accuracy=(model(inputs).argmax(1) == labels).float().mean().item())  # tt
