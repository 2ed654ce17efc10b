"""Segmentation: every pixel has a label; a convolutional network with a skip connection and group norm."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import torrential as tt  # tt

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--shuffle", action="store_true")
args = parser.parse_args()


class Blobs(Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, index):
        image = torch.randn(1, 12, 12, generator=torch.Generator().manual_seed(index))
        mask = F.avg_pool2d(image, 3, stride=1, padding=1)[0] > 0
        return {"image": image, "mask": mask.float()}


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Conv2d(1, 8, 3, padding=1, stride=2)
        self.norm = nn.GroupNorm(2, 8)
        self.up = nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.out = nn.Conv2d(9, 1, 3, padding=1)

    def forward(self, x):
        inner = self.up(F.relu(self.norm(self.down(x))))
        return self.out(torch.cat([x, inner], dim=1)).squeeze(1)


torch.manual_seed(0)
model = UNet()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
loader = DataLoader(Blobs(), batch_size=args.batch, shuffle=args.shuffle)
run = tt.join()  # tt
model, optimizer, loader = run.prepare(model, optimizer, loader)  # tt

for _ in range(2):
    overlap = []
    for batch in loader:
        logits = model(batch["image"])
        loss = F.binary_cross_entropy_with_logits(logits, batch["mask"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found, true = logits > 0, batch["mask"] > 0
        overlap.append((found & true).sum().item() / max(1, (found | true).sum().item()))
    run.report(iou=sum(overlap) / max(1, len(overlap)))  # tt
