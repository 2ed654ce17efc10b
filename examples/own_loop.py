"""A training loop of your own, on two workers. Started by itself, `train()` would be a plain loop."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import torrential as tt


def train():
    torch.manual_seed(0)
    inputs = torch.randn(1024, 2)
    labels = (inputs.norm(dim=1) > 1).long()
    model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(inputs, labels), batch_size=16, shuffle=True)

    run = tt.join()
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    for _ in run.epochs(5):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        run.report(accuracy=(model(inputs).argmax(1) == labels).float().mean().item())


if __name__ == "__main__":
    for strategy in ("allreduce", "ssp"):
        result = tt.launch(train, strategy, workers=2, progress=False)
        print(f"{strategy}: accuracy {result.summary.value:.1%} after {result.summary.samples} samples")
