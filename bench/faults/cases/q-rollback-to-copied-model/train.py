"""Bracket language: is a string of ()[] well-formed? GRU classifier with early rollback to the best model."""

import argparse
import copy
import random

import torch
import torch.nn as nn
from torch.nn.utils.rnn import pad_sequence

VOCAB = {"<pad>": 0, "(": 1, ")": 2, "[": 3, "]": 4}


def well_formed(rng, depth):
    if depth == 0:
        return ""
    left, right = rng.choice(["()", "[]"])
    return left + well_formed(rng, rng.randrange(depth)) + right + well_formed(rng, rng.randrange(depth))


def make_split(rng, count):
    rows = []
    for _ in range(count):
        text = well_formed(rng, 4) or "()"
        label = rng.random() < 0.5
        if not label:
            chars = list(text)
            position = rng.randrange(len(chars))
            chars[position] = rng.choice([c for c in "()[]" if c != chars[position]])
            text = "".join(chars)
        rows.append((torch.tensor([VOCAB[c] for c in text]), float(label)))
    return rows


def collate(rows):
    tokens = pad_sequence([r[0] for r in rows], batch_first=True)
    return tokens, torch.tensor([len(r[0]) for r in rows]), torch.tensor([r[1] for r in rows])


class BracketNet(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.embed = nn.Embedding(len(VOCAB), dim, padding_idx=0)
        self.rnn = nn.ModuleList([nn.Linear(2 * dim, 2 * dim), nn.Linear(2 * dim, dim)])
        self.out = nn.Linear(dim, 1)
        self.dim = dim

    def forward(self, tokens, lengths):
        x = self.embed(tokens)
        h = x.new_zeros(len(tokens), self.dim)
        for t in range(tokens.shape[1]):
            z = torch.cat([x[:, t], h], -1)
            gate = torch.sigmoid(self.rnn[0](z))
            update, reset = gate.chunk(2, -1)
            new = torch.tanh(self.rnn[1](torch.cat([x[:, t], reset * h], -1)))
            keep = (t < lengths)[:, None]
            h = torch.where(keep, update * h + (1 - update) * new, h)
        return self.out(h).squeeze(-1)


def run_epoch(model, rows, batch_size, optimizer=None, scaler=None):
    losses = []
    for i in range(0, len(rows), batch_size):
        tokens, lengths, labels = collate(rows[i : i + batch_size])
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(tokens, lengths)
            loss = nn.functional.binary_cross_entropy_with_logits(logits, labels)
        if optimizer is not None:
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        losses.append(loss.item())
    return sum(losses) / len(losses)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=8)
    p.add_argument("--batch-size", type=int, default=16)
    p.add_argument("--lr", type=float, default=0.03)
    p.add_argument("--tolerance", type=float, default=0.0)
    args = p.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rng = random.Random(0)
    train, dev = make_split(rng, 96), make_split(rng, 64)

    model = BracketNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    scaler = torch.amp.GradScaler("cpu")
    best, best_model = float("inf"), None
    for epoch in range(args.epochs):
        rng.shuffle(train)
        train_loss = run_epoch(model, train, args.batch_size, optimizer, scaler)
        with torch.no_grad():
            dev_loss = run_epoch(model, dev, args.batch_size)
        print(f"epoch {epoch}  train {train_loss:.4f}  dev {dev_loss:.4f}")
        if dev_loss < best:
            best, best_model = dev_loss, copy.deepcopy(model)
        elif dev_loss > best + args.tolerance:
            print("worse than the best so far, going back")
            model = copy.deepcopy(best_model)


if __name__ == "__main__":
    main()
