import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from config import get_config
from utils import CosineWithWarmup, NativeScalerWithGradNormCount


class MixerBlock(nn.Module):
    def __init__(self, tokens, dim):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.tokens = nn.Sequential(nn.Linear(tokens, 2 * tokens), nn.GELU(), nn.Linear(2 * tokens, tokens))
        self.channels = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class Backbone(nn.Module):
    def __init__(self, classes=6, dim=32, depth=2):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, dim, 4, 4)
        self.blocks = nn.ModuleList(MixerBlock(16, dim) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, x):
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def build_loader(config):
    g = torch.Generator().manual_seed(config.seed)
    labels = torch.randint(0, 6, (480,), generator=g)
    hue = torch.eye(3).repeat(2, 1)[labels] * torch.where(labels < 3, 1.0, -1.0)[:, None]
    images = torch.randn(480, 3, 16, 16, generator=g) + hue[:, :, None, None]
    return DataLoader(TensorDataset(images, labels), config.batch_size, shuffle=True, generator=g, drop_last=True)


def train_one_epoch(config, model, criterion, data_loader, optimizer, epoch, lr_scheduler, loss_scaler):
    model.train()
    optimizer.zero_grad()
    num_steps, accumulation = len(data_loader), config.train.accumulation
    for idx, (samples, targets) in enumerate(data_loader):
        with torch.autocast("cpu", dtype=torch.float16, enabled=config.amp_enabled):
            outputs = model(samples)
        loss = criterion(outputs, targets) / accumulation
        update = (idx + 1) % accumulation == 0
        grad_norm = loss_scaler(
            loss, optimizer, clip_grad=config.train.clip_grad, parameters=model.parameters(), update_grad=update
        )
        if update:
            optimizer.zero_grad()
            lr_scheduler.step_update((epoch * num_steps + idx) // accumulation)
        if idx % 10 == 0:
            scale = loss_scaler.state_dict()["scale"]
            lr = optimizer.param_groups[0]["lr"]
            print(f"[{epoch}][{idx}/{num_steps}] lr {lr:.5f} loss {loss:.4f} grad_norm {grad_norm:.3f} scale {scale}")


def main(config):
    torch.set_num_threads(1)
    torch.manual_seed(config.seed)
    model, loader = Backbone(), build_loader(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.train.base_lr, weight_decay=config.train.weight_decay)
    loss_scaler = NativeScalerWithGradNormCount()
    lr_scheduler = CosineWithWarmup(
        optimizer,
        config.train.base_lr,
        config.train.warmup_epochs * len(loader),
        config.train.epochs * len(loader),
    )
    print(
        f"AMP {'enabled' if config.amp_enabled else 'disabled'}, {sum(p.numel() for p in model.parameters())} weights"
    )
    for epoch in range(config.train.epochs):
        train_one_epoch(config, model, nn.CrossEntropyLoss(), loader, optimizer, epoch, lr_scheduler, loss_scaler)


if __name__ == "__main__":
    main(get_config())
