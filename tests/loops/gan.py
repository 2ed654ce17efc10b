"""A GAN: two models, two optimizers, two steps on every batch."""

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

torch.manual_seed(0)
real_data = 0.5 * torch.randn(128, 2) + 2
generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
discriminator = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
g_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
d_optimizer = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999))
loader = DataLoader(TensorDataset(real_data), batch_size=args.batch, shuffle=args.shuffle, drop_last=True)
run = tt.join()  # tt
generator, g_optimizer = run.prepare(generator, g_optimizer)  # tt
discriminator, d_optimizer, loader = run.prepare(discriminator, d_optimizer, loader)  # tt

fake = torch.zeros(1, 2)
for _ in range(2):
    for (real,) in loader:
        fake = generator(torch.randn(len(real), 4))
        d_optimizer.zero_grad()
        d_loss = F.softplus(-discriminator(real)).mean() + F.softplus(discriminator(fake.detach())).mean()
        d_loss.backward()
        d_optimizer.step()
        g_optimizer.zero_grad()
        g_loss = F.softplus(-discriminator(fake)).mean()
        g_loss.backward()
        g_optimizer.step()
    run.report(distance=(fake.mean(0) - 2).norm().item())  # tt
