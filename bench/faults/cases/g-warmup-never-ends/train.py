import argparse

import torch
import torch.nn.functional as F

from model import LanguageModel


def corpus(g, n=48, length=21, vocab=32):
    """Sequences that repeat themselves with a random period."""
    period = torch.randint(2, 7, (n, 1), generator=g)
    seed = torch.randint(0, vocab, (n, 8), generator=g)
    return seed.gather(1, torch.arange(length)[None] % period)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--lr", type=float, default=4e-3)
    p.add_argument("--warmup", type=int, default=4, help="in steps")
    p.add_argument("--steps", type=int, default=400)
    p.add_argument("--bf16", action="store_true")
    a = p.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(13)
    g = torch.Generator().manual_seed(4)
    model = LanguageModel()
    opt = torch.optim.Adam(model.parameters(), lr=a.lr, betas=(0.9, 0.98), eps=1e-9)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: (s + 1) / a.warmup)
    for step in range(a.steps):
        ids = corpus(g)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=a.bf16):
            logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        if step % 5 == 0:
            print(f"step {step:3d} lr {sched.get_last_lr()[0]:.3f} nll {loss.item():.4g}")
        if loss.isnan():
            print(f"nll is nan at step {step}")
            break


if __name__ == "__main__":
    main()
