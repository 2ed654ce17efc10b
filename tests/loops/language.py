"""A character transformer with parameter groups, clipping and a rate that warms up at every step."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import torrential as tt  # tt

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--shuffle", action="store_true")
args = parser.parse_args()

TEXT = "the quick brown fox jumps over the lazy dog; " * 6
VOCABULARY = sorted(set(TEXT))


class Characters(Dataset):
    def __len__(self):
        return 128

    def __getitem__(self, at):
        codes = torch.tensor([VOCABULARY.index(c) for c in TEXT[at : at + 17]])
        return codes[:-1], codes[1:]


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(len(VOCABULARY), 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, len(VOCABULARY), bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, codes):
        mask = nn.Transformer.generate_square_subsequent_mask(codes.shape[1])
        return self.head(self.block(self.embedding(codes), src_mask=mask, is_causal=True))


torch.manual_seed(0)
model = Transformer()
decayed = [p for p in model.parameters() if p.dim() > 1]
others = [p for p in model.parameters() if p.dim() < 2]
groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=3e-3, eps=1e-4)
loader = DataLoader(Characters(), batch_size=args.batch, shuffle=args.shuffle)
warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
run = tt.join()  # tt
model, optimizer, loader, warmup = run.prepare(model, optimizer, loader, warmup)  # tt

loss = torch.zeros(())
for _ in range(2):
    for codes, following in loader:
        loss = F.cross_entropy(model(codes).flatten(0, 1), following.flatten())
        optimizer.zero_grad()
        loss.backward()
        run.clip_grad_norm_(model.parameters(), 1.0)  # tt: nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warmup.step()
    run.report(perplexity=loss.exp().item())  # tt
