import torch
import torch.nn as nn
import torch.nn.functional as F


class VolumeEncoder(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.stem = nn.Conv3d(1, width, 3, stride=2, padding=1)
        self.body = nn.Sequential(
            nn.GroupNorm(2, width), nn.ReLU(), nn.Conv3d(width, 2 * width, 3, stride=2, padding=1), nn.ReLU()
        )
        self.decoder = nn.ConvTranspose3d(2 * width, 1, 4, stride=4)

    def forward(self, volume, mask):
        z = self.body(self.stem(volume * (1 - mask)))
        return self.decoder(z)


class Volumes:
    def __init__(self, seed):
        self.g = torch.Generator().manual_seed(seed)

    def batch(self, n=4, size=16):
        grid = torch.stack(torch.meshgrid(*[torch.linspace(-1, 1, size)] * 3, indexing="ij"))
        centre = torch.rand(n, 3, 1, 1, 1, generator=self.g) - 0.5
        volume = torch.exp(-4 * (grid - centre).square().sum(1, keepdim=True))
        mask = (torch.rand(n, 1, size // 4, size // 4, size // 4, generator=self.g) < 0.5).float()
        return volume, F.interpolate(mask, scale_factor=4)


class Pretrainer:
    def __init__(self, model, lr, eval_every):
        self.model, self.eval_every = model, eval_every
        self.opt = torch.optim.AdamW(model.parameters(), lr=lr)
        self.scaler = torch.amp.GradScaler("cpu")
        self.train_data, self.val_data = Volumes(1), Volumes(2)
        self.iteration = 0

    def forward_loss(self, data):
        volume, mask = data.batch()
        with torch.autocast("cpu", dtype=torch.float16):
            recon = self.model(volume, mask)
        return ((recon.float() - volume).square() * mask).sum() / mask.sum()

    def validate(self):
        self.opt.zero_grad(set_to_none=True)  # frees memory for the large validation volumes
        self.model.eval()
        with torch.no_grad():
            losses = [self.forward_loss(self.val_data) for _ in range(2)]
        self.model.train()
        print(f"  val @ {self.iteration}: {torch.stack(losses).mean():.5f}")

    def before_step(self):
        if self.iteration and self.iteration % self.eval_every == 0:
            self.validate()

    def train_iteration(self):
        self.opt.zero_grad(set_to_none=True)
        loss = self.forward_loss(self.train_data)
        self.scaler.scale(loss).backward()
        self.before_step()
        self.scaler.step(self.opt)
        self.scaler.update()
        if self.iteration % 4 == 0:
            print(f"iter {self.iteration}: loss {loss.item():.5f}")
        self.iteration += 1


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    trainer = Pretrainer(VolumeEncoder(), lr=2e-3, eval_every=10)
    for _ in range(30):
        trainer.train_iteration()


if __name__ == "__main__":
    main()
