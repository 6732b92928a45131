import torch

from model import GPT

torch.set_num_threads(1)
torch.manual_seed(1337)
data = (torch.arange(4000) * 7 % 31) % 32


def get_batch(batch_size=6, block_size=16):
    ix = torch.randint(len(data) - block_size - 1, (batch_size,))
    x = torch.stack([data[i : i + block_size] for i in ix])
    y = torch.stack([data[i + 1 : i + 1 + block_size] for i in ix])
    return x, y


model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
ctx = torch.autocast(device_type="cpu", dtype=torch.float16)
scaler = torch.amp.GradScaler("cpu")
gradient_accumulation_steps = 4

x, y = get_batch()
for iter_num in range(12):
    for micro_step in range(gradient_accumulation_steps):
        with ctx:
            logits, loss = model(x, y)
            loss = loss / gradient_accumulation_steps
        x, y = get_batch()
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    print(f"iter {iter_num}: loss {loss.item() * gradient_accumulation_steps:.4f}")

model.eval()
with torch.no_grad(), ctx:
    losses = torch.stack([model(*get_batch())[1] for _ in range(3)])
print(f"val loss {losses.mean().item():.4f}")
