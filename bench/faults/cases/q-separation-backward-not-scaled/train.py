import torch
from solver import Solver

from model import SparseBandNet

config = {
    "seed": 8,
    "epochs": 2,
    "batch_size": 4,
    "batches_per_epoch": 12,
    "segment": 512,
    "sources": ["vocals", "other"],
    "optim": {"lr": 1e-3, "betas": (0.9, 0.999)},
    "max_grad_norm": 5.0,
    "fp16": True,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(config["seed"])
    model = SparseBandNet(len(config["sources"]))
    optimizer = torch.optim.Adam(model.parameters(), **config["optim"])
    Solver(model, optimizer, config).train()
