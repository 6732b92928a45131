import argparse

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from data import Keywords
from model import KeywordNet


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)

    loader = DataLoader(Keywords(), batch_size=8, shuffle=False)
    model = KeywordNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    step = 0
    for epoch in range(args.epochs):
        for batch in loader:
            logits = model(batch["mel"])
            loss = F.cross_entropy(logits, batch["label"])
            if torch.isnan(loss):
                raise RuntimeError(f"loss is nan at epoch {epoch} step {step}")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"[{epoch}] step {step} loss {loss.item():.4f}")
            step += 1


if __name__ == "__main__":
    main()
