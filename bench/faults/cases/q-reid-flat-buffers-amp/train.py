import argparse
import logging

import torch

from reid.engine import AMPTrainer
from reid.flat_params import ContiguousParams
from reid.model import Baseline


def build_loader(identities=8, per_id=4):
    g = torch.Generator().manual_seed(4)
    looks = torch.randn(identities, 3, 16, 8, generator=g)
    while True:
        targets = torch.randperm(identities, generator=g)[:4].repeat_interleave(per_id)
        yield {"images": looks[targets] + 0.5 * torch.randn(len(targets), 3, 16, 8, generator=g), "targets": targets}


def build_optimizer(model, lr, contiguous=True):
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decay, "weight_decay": 5e-4}, {"params": rest, "weight_decay": 0.0}]
    wrapper = ContiguousParams(groups)
    return torch.optim.Adam(wrapper.contiguous() if contiguous else groups, lr=lr), wrapper


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--base-lr", type=float, default=3.5e-3)
    parser.add_argument("--max-iter", type=int, default=40)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="[%(name)s]: %(message)s")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Baseline()
    optimizer, param_wrapper = build_optimizer(model, args.base_lr)
    AMPTrainer(model, build_loader(), optimizer, param_wrapper).train(args.max_iter)


if __name__ == "__main__":
    main()
