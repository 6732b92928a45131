import torch
import torch.nn.functional as F

from unet import TinyUNet

torch.set_num_threads(1)
torch.manual_seed(5)

prompts = torch.randn(12, 6, 24)
latents = torch.randn(12, 4, 6, 6)

unet = TinyUNet()
optimizer = torch.optim.AdamW(unet.parameters(), lr=2e-2, weight_decay=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
skipped_in_a_row = 0
for step in range(70):
    idx = torch.randint(0, 12, (4,))
    noise = torch.randn(4, 4, 6, 6)
    t = torch.rand(4)
    a = torch.cos(t * 1.5)[:, None, None, None]
    noisy = a * latents[idx] + (1 - a**2).sqrt() * noise
    with torch.autocast(device_type="cpu", dtype=torch.float16):
        pred = unet(noisy, t, prompts[idx])
    loss = F.mse_loss(pred.float(), noise)
    if torch.isnan(loss):
        print(f"step {step}: loss is nan, skipping the batch")
        optimizer.zero_grad()
        skipped_in_a_row += 1
        if skipped_in_a_row == 3:
            break
        continue
    skipped_in_a_row = 0
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    if step % 10 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
