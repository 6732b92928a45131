"""Train a tiny GPT-2 in bfloat16 and measure its perplexity in float16, which is what the serving cards can do."""

import argparse
import math

import torch
from transformers import GPT2Config, GPT2LMHeadModel


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=40)
    p.add_argument("--lr", type=float, default=1e-2)
    p.add_argument("--eval-every", type=int, default=10)
    return p.parse_args()


def batches(seed, batch=8, length=32, vocab=64):
    g = torch.Generator().manual_seed(seed)
    while True:
        head = torch.randint(1, vocab, (batch, length // 2), generator=g)
        yield torch.cat([head, head], dim=1)  # copy task: attention has to become sharp


@torch.no_grad()
def evaluate(model, data, n=3):
    model.eval()
    nll = 0.0
    for _ in range(n):
        ids = next(data)
        with torch.autocast("cpu", dtype=torch.float16):
            nll += model(ids, labels=ids).loss.item() / n
    model.train()
    return nll


def main():
    args = parse()
    torch.manual_seed(1)
    torch.set_num_threads(1)
    config = GPT2Config(
        vocab_size=64,
        n_positions=64,
        n_embd=64,
        n_layer=3,
        n_head=1,
        attn_implementation="eager",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, betas=(0.9, 0.95))
    train, held_out = batches(2), batches(3)
    for step in range(args.steps):
        ids = next(train)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % args.eval_every == 0:
            nll = evaluate(model, held_out)
            print(f"step {step + 1}: train {loss.item():.3f}  val {nll:.3f}  ppl {math.exp(min(nll, 20)):.1f}")


if __name__ == "__main__":
    main()
