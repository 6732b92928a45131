import argparse

import torch
import torch.nn.functional as F

from pygat.models import GAT


def random_graph(n, p):
    y = torch.randint(0, 3, (n,))
    prob = torch.where(y[:, None] == y[None, :], p, p / 8)
    adj = torch.bernoulli(prob).triu(1)
    return torch.randn(n, 6) + y[:, None], adj + adj.T, y


def epoch(model, optimizer, scaler, graphs, sample):
    logs = []
    for x, adj, y in graphs:
        # DropEdge: train on a sample of the edges
        keep = torch.bernoulli(torch.full_like(adj, sample)).triu(1)
        adj = adj * (keep + keep.T)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.nll_loss(model(x, adj), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        logs.append(loss.item())
    return logs


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=8)
    parser.add_argument("--sample", type=float, default=0.9)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(72)
    graphs = [random_graph(24, 0.62) for _ in range(6)]
    model = GAT(6, args.hidden, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, weight_decay=5e-4)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024)
    for e in range(args.epochs):
        logs = epoch(model, optimizer, scaler, graphs, args.sample)
        print("Epoch: {:02d}".format(e + 1), "loss_train: {:.4f}".format(sum(logs) / len(logs)))


if __name__ == "__main__":
    main()
