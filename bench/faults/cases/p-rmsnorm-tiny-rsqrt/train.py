import os
import sys

import torch

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from model import MiniLM  # noqa: E402

torch.set_num_threads(1)
torch.manual_seed(1337)
device, ptdtype = "cpu", torch.float16
ctx = torch.amp.autocast(device_type=device, dtype=ptdtype)

# character ids 0..69 are common, 70..79 were added to the tokenizer afterwards and start (nearly) at zero
model = MiniLM()
with torch.no_grad():
    model.tok_embeddings.weight[70:] *= 1e-4

corpus = torch.randint(0, 70, (4000,))
corpus[1:] = torch.where(torch.rand(3999) < 0.7, (corpus[:-1] * 3 + 1) % 70, corpus[1:])
corpus[2611] = 74


def get_batch(it, bs=8, block=16):
    start = (it * bs * block) % 3800
    ix = [min(start + i * block, 3980) for i in range(bs)]
    x = torch.stack([corpus[i : i + block] for i in ix])
    y = torch.stack([corpus[i + 1 : i + 1 + block] for i in ix])
    return x, y


optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
scaler = torch.amp.GradScaler(device, init_scale=1024.0)
for it in range(28):
    X, Y = get_batch(it)
    with ctx:
        logits, loss = model(X, Y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    if it % 4 == 0:
        print(f"iter {it}: loss {loss.item():.4f}")
