import torch
import torch.nn as nn
from torch.utils.data import DataLoader, IterableDataset

GRAD_CLIP, SKIP_ABOVE = 1.0, 20.0


class Views(IterableDataset):
    """Two posed views of a scene as tokens, and the target view to synthesise. Some captures are overexposed."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        g = torch.Generator().manual_seed(21)
        for index in range(self.count):
            scene = torch.randn(1, 16, generator=g)
            pose = torch.linspace(-1, 1, 8)[:, None]
            views = torch.tanh(scene * (1 + pose)) + 0.05 * torch.randn(8, 16, generator=g)
            target = torch.tanh(scene * (1.5 - pose))
            if index in (76, 77, 131):
                target = target * 40
            yield {"input": views, "target": target}


class LVSM(nn.Module):
    def __init__(self, dim=48, layers=2):
        super().__init__()
        self.image_tokenizer = nn.Linear(16, dim)
        self.pose_tokens = nn.Parameter(0.02 * torch.randn(1, 8, dim))
        self.transformer = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, 4, 2 * dim, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.image_token_decoder = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 16))

    def forward(self, batch):
        tokens = torch.cat(
            [self.image_tokenizer(batch["input"]), self.pose_tokens.expand(len(batch["input"]), -1, -1)], 1
        )
        for block in self.transformer:
            tokens = block(tokens)
        render = self.image_token_decoder(tokens[:, 8:])
        loss = (render.float() - batch["target"]).square().mean()
        return loss, -10 * torch.log10(loss.detach())


torch.manual_seed(95)
torch.set_num_threads(1)
model = LVSM()
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-4, betas=(0.9, 0.95))
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min(1.0, (i + 1) / 10))
scaler = torch.amp.GradScaler("cpu", init_scale=2048)
loader = DataLoader(Views(240), batch_size=8)

update_step = 0
for forward_step, batch in enumerate(loader):
    with torch.autocast("cpu", dtype=torch.float16):
        loss, psnr = model(batch)
    scaler.scale(loss).backward()

    scaler.unscale_(optimizer)
    total_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=GRAD_CLIP)
    if not torch.isfinite(total_norm) or total_norm > SKIP_ABOVE:
        print(
            f"WARNING: step {forward_step} grad norm too large {total_norm:.2f} > {SKIP_ABOVE}, skipping optimizer step"
        )
        optimizer.zero_grad(set_to_none=True)
        continue

    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
    optimizer.zero_grad(set_to_none=True)
    update_step += 1
    if forward_step % 3 == 0:
        print(
            f"Forward step: {forward_step:4d} (update {update_step}) | loss: {loss.item():.4f} | psnr: {psnr.item():.2f}"
        )
