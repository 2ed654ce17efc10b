"""A GAN in a loop of your own: two models and two optimizers, so two steps for every batch."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import torrential as tt


def train():
    torch.manual_seed(0)
    real_points = 0.3 * torch.randn(2048, 2) + torch.tensor([2.0, -1.0])
    generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
    discriminator = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    g_optimizer = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.9))
    d_optimizer = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.9))
    loader = DataLoader(TensorDataset(real_points), batch_size=32, shuffle=True, drop_last=True)

    run = tt.join()
    generator, g_optimizer = run.prepare(generator, g_optimizer)
    discriminator, d_optimizer, loader = run.prepare(discriminator, d_optimizer, loader)
    for _ in run.epochs(10):
        for (real,) in loader:
            fake = generator(torch.randn(len(real), 4))
            d_optimizer.zero_grad()
            (F.softplus(-discriminator(real)) + F.softplus(discriminator(fake.detach()))).mean().backward()
            d_optimizer.step()
            g_optimizer.zero_grad()
            F.softplus(-discriminator(fake)).mean().backward()
            g_optimizer.step()
        made = generator(torch.randn(500, 4)).mean(0)
        run.report(distance=(made - torch.tensor([2.0, -1.0])).norm().item())


if __name__ == "__main__":
    result = tt.launch(train, workers=2, minimize=True, progress=False)
    print(f"{result.summary.steps} steps; the mean of what is made is {result.summary.value:.2f} from that of the data")
