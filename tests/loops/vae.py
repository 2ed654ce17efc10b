"""A variational autoencoder: random numbers in the forward pass, and a loss of two parts."""

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


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(8, 6)
        self.decoder = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, x):
        mean, log_variance = self.encoder(x).chunk(2, dim=1)
        z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return self.decoder(z), mean, log_variance


torch.manual_seed(0)
data = torch.randn(128, 3) @ torch.randn(3, 8)
model = VAE()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
loader = DataLoader(TensorDataset(data), batch_size=args.batch, shuffle=args.shuffle)
run = tt.join()  # tt
model, optimizer, loader = run.prepare(model, optimizer, loader)  # tt

loss = torch.zeros(())
for _ in run.epochs(3):  # tt: for _ in range(3):
    for (x,) in loader:
        output, mean, log_variance = model(x)
        divergence = -0.5 * (1 + log_variance - mean.pow(2) - log_variance.exp()).sum(1).mean()
        loss = F.mse_loss(output, x) + 0.01 * divergence
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    run.report(loss=loss.item())  # tt
