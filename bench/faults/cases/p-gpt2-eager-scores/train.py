import torch
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, set_seed

torch.set_num_threads(1)
set_seed(8)

config = GPT2Config(
    vocab_size=96,
    n_positions=32,
    n_embd=32,
    n_layer=3,
    n_head=2,
    bos_token_id=0,
    eos_token_id=0,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
    attn_implementation="eager",
)
model = GPT2LMHeadModel(config)
# sharp heads in the middle layer, as in the checkpoint this run continues
torch.nn.init.normal_(model.transformer.h[1].attn.c_attn.weight, std=11.26)

data = torch.randint(0, 96, (96, 1)) + torch.arange(16) * torch.randint(1, 4, (96, 1))
loader = DataLoader(data % 96, batch_size=6, shuffle=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=64.0)

model.train()
step = 0
for epoch in range(3):
    for input_ids in loader:
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(input_ids=input_ids, labels=input_ids).loss
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if step % 5 == 0 or loss.isnan():
            print(f"step {step:3d} | loss {loss.item():.4f} | scale {scaler.get_scale():g}")
        if loss.isnan():
            raise SystemExit("training diverged")
        step += 1
