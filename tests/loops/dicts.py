"""Text classification: batches are dicts of padded sequences, made by a collate function."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

import torrential as tt  # tt

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--shuffle", action="store_true")
args = parser.parse_args()


class Sentences(Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, index):
        draw = torch.Generator().manual_seed(index)
        words = torch.randint(1, 20, (3 + index % 5,), generator=draw)
        return {"input_ids": words, "label": int(words[0] > 9)}


def collate(items):
    ids = pad_sequence([item["input_ids"] for item in items], batch_first=True)
    return {"input_ids": ids, "mask": ids > 0, "labels": torch.tensor([item["label"] for item in items])}


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 8, padding_idx=0)
        self.out = nn.Linear(8, 2)

    def forward(self, input_ids, mask, labels=None):
        pooled = self.embedding(input_ids).sum(1) / mask.sum(1, keepdim=True)
        logits = self.out(pooled)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


torch.manual_seed(0)
model = Classifier()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = DataLoader(Sentences(), batch_size=args.batch, shuffle=args.shuffle, collate_fn=collate)
run = tt.join()  # tt
model, optimizer, loader = run.prepare(model, optimizer, loader)  # tt

for _ in range(3):
    right = 0
    for batch in loader:
        output = model(**batch)
        output["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        right += (output["logits"].argmax(1) == batch["labels"]).sum().item()
    run.report(right=right)  # tt
