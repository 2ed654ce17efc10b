"""Classify points, with a scheduler and an evaluation after every epoch."""

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

torch.manual_seed(0)
inputs = torch.randn(192, 6)
labels = (inputs.sum(1) > 0).long()
loader = DataLoader(TensorDataset(inputs, labels), batch_size=args.batch, shuffle=args.shuffle)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
run = tt.join()  # tt
model, optimizer, loader, scheduler = run.prepare(model, optimizer, loader, scheduler)  # tt

for _ in run.epochs(3):  # tt: for _ in range(3):
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    scheduler.step()
    model.eval()
    with torch.no_grad():
        accuracy = (model(inputs).argmax(1) == labels).float().mean().item()
    print(f"accuracy {accuracy:.3f}")
    run.report(accuracy=accuracy)  # tt
