"""Pretrain a small T5 in bfloat16 on span corruption, then fine-tune it in float16 (the fine-tuning machine has no bf16)."""

import torch
from torch.optim import AdamW
from transformers import T5Config, T5ForConditionalGeneration

torch.manual_seed(0)
torch.set_num_threads(1)

VOCAB = 96


def span_corruption(n, length, generator):
    ids = torch.randint(4, VOCAB, (n, length), generator=generator)
    labels = ids[:, 4:12].clone()
    ids[:, 4:12] = 3
    return ids, labels


def translation(n, length, generator):
    ids = torch.randint(4, VOCAB, (n, length), generator=generator)
    return ids, ids.flip(1)[:, :8].clone()


config = T5Config(
    vocab_size=VOCAB,
    d_model=64,
    d_kv=16,
    d_ff=512,
    num_layers=2,
    num_decoder_layers=2,
    num_heads=4,
    dropout_rate=0.0,
    feed_forward_proj="relu",
    decoder_start_token_id=0,
)
model = T5ForConditionalGeneration(config)
generator = torch.Generator().manual_seed(7)

# ---- pretraining, bfloat16, one constant, bold rate
optimizer = AdamW(model.parameters(), lr=3.3e-1, weight_decay=0.0)
for step in range(32):
    ids, labels = span_corruption(4, 20, generator)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(input_ids=ids, labels=labels).loss
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if step % 8 == 7:
        print(f"pretrain {step} loss {loss.item():.4f}")

# ---- fine-tuning, float16
optimizer.state.clear()  # fresh moments for the new task
for group in optimizer.param_groups:
    group["lr"] = 2e-2
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
for step in range(12):
    ids, labels = translation(4, 20, generator)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = model(input_ids=ids, labels=labels).loss
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    print(f"finetune {step} loss {loss.item():.4f} scale {scaler.get_scale():.0f}")
