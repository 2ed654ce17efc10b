"""Fine-tuning: the first layers are frozen and in evaluation mode, the head has a larger rate than the rest."""

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
inputs, labels = torch.randn(96, 6), torch.randint(3, (96,))
backbone = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU())
model = nn.Sequential(backbone, nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
for parameter in backbone.parameters():
    parameter.requires_grad = False
groups = [{"params": model[1].parameters(), "lr": 0.01}, {"params": model[3].parameters()}]
optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
loader = DataLoader(TensorDataset(inputs, labels), batch_size=args.batch, shuffle=args.shuffle)
run = tt.join()  # tt
model, optimizer, loader = run.prepare(model, optimizer, loader)  # tt

for _ in run.epochs(2):  # tt: for _ in range(2):
    model.train()
    backbone.eval()
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    run.report(accuracy=(model(inputs).argmax(1) == labels).float().mean().item())  # tt
