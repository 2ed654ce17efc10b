"""Contrastive learning with a loss of its own: two views of every sample, all others of the batch are negatives."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import torrential as tt  # tt

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=16)
parser.add_argument("--shuffle", action="store_true")
args = parser.parse_args()


class InfoNCE(nn.Module):
    def __init__(self):
        super().__init__()
        self.log_temperature = nn.Parameter(torch.zeros(()))

    def forward(self, one, other):
        similarity = F.normalize(one) @ F.normalize(other).T * self.log_temperature.exp()
        return F.cross_entropy(similarity, torch.arange(len(one)))


torch.manual_seed(0)
data = torch.randn(128, 10)
encoder, criterion = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 8)), InfoNCE()
optimizer = torch.optim.Adam([*encoder.parameters(), *criterion.parameters()], lr=1e-2)
loader = DataLoader(TensorDataset(data), batch_size=args.batch, shuffle=args.shuffle, drop_last=True)
run = tt.join()  # tt
encoder, criterion, optimizer, loader = run.prepare(encoder, criterion, optimizer, loader)  # tt

loss = torch.zeros(())
for _ in run.epochs(2):  # tt: for _ in range(2):
    for (x,) in loader:
        one, other = (x + 0.1 * torch.randn_like(x) for _ in range(2))
        loss = criterion(encoder(one), encoder(other))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    run.report(loss=loss.item())  # tt
