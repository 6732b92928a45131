"""Language modelling with a small GPT-2 in bfloat16: padding, eager attention with a causal mask, gradient accumulation."""

import torch
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, get_cosine_schedule_with_warmup

torch.manual_seed(0)
torch.set_num_threads(1)

config = GPT2Config(
    vocab_size=80,
    n_positions=48,
    n_embd=48,
    n_layer=2,
    n_head=4,
    attn_implementation="eager",
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
    use_cache=False,
)
model = GPT2LMHeadModel(config)


def collate(lengths):
    width = max(lengths)
    ids = torch.zeros(len(lengths), width, dtype=torch.long)
    for row, n in enumerate(lengths):
        start = 3 + 7 * row % 70
        ids[row, :n] = (start + torch.arange(n)) % 77 + 3
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": ids.masked_fill(ids == 0, -100)}


lengths = [8 + (5 * i) % 24 for i in range(256)]
loader = DataLoader(lengths, batch_size=8, collate_fn=collate, num_workers=2)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
schedule = get_cosine_schedule_with_warmup(optimizer, 2, 16)
accumulate = 2
model.train()
for i, batch in enumerate(loader):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(**batch).loss / accumulate
    loss.backward()
    if (i + 1) % accumulate == 0:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        print(f"step {(i + 1) // accumulate} loss {loss.item() * accumulate:.4f}")

model.eval()
with torch.inference_mode():
    batch = collate([20, 12, 30])
    print("eval", model(**batch).loss.item())
    print(
        model.generate(
            batch["input_ids"][2:, :6],
            attention_mask=torch.ones(1, 6, dtype=torch.long),
            max_new_tokens=4,
            do_sample=False,
        ).tolist()
    )
