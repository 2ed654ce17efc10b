"""Images as bytes: setting some aside, augmenting whole batches of them, and the layer that makes them floats."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

_SPLIT_SEED = 0
_PADDING = 4


class Pixels(nn.Module):
    """Bytes to floats of mean 0 and deviation 1, given those of the data set."""

    def __init__(self, mean: float, deviation: float) -> None:
        super().__init__()
        self.mean, self.deviation = mean, deviation

    def forward(self, images: Tensor) -> Tensor:
        return images.float().sub_(self.mean).div_(self.deviation)


class FlipAndCrop(TensorDataset):
    """Images (n, c, h, w) that batches show mirrored half of the time and shifted by up to 4 pixels, edges black.

    Drawn from torch's generator of the images' device. Single items are as they are.
    """

    def augment(self, images: Tensor) -> Tensor:
        n, _, height, width = images.shape
        device = images.device
        top, left = torch.randint(2 * _PADDING + 1, (2, n, 1), device=device)
        mirrored = torch.rand(n, 1, device=device) < 0.5
        across = torch.arange(width, device=device)
        rows = top + torch.arange(height, device=device)  # (n, h)
        columns = left + torch.where(mirrored, across.flip(0), across)  # (n, w)
        padded = F.pad(images, (_PADDING,) * 4).permute(0, 2, 3, 1)
        picked = padded[torch.arange(n, device=device)[:, None, None], rows[:, :, None], columns[:, None, :]]
        return picked.permute(0, 3, 1, 2).contiguous()


def split(images: Tensor, labels: Tensor, held: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Train and validation: all but the last `held` (at least 1) of a fixed shuffle, and those."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(_SPLIT_SEED))
    held = max(1, held)
    train, validation = order[:-held], order[-held:]
    return (images[train], labels[train]), (images[validation], labels[validation])
