import torch
import torch.nn as nn
import torch.nn.functional as F

torch.set_num_threads(1)
torch.manual_seed(0)
LATENT = 16


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(LATENT, 32 * 4 * 4)
        self.up = nn.Sequential(
            nn.BatchNorm2d(32),
            nn.ReLU(True),
            nn.ConvTranspose2d(32, 16, 4, 2, 1),
            nn.BatchNorm2d(16),
            nn.ReLU(True),
            nn.ConvTranspose2d(16, 1, 4, 2, 1),
            nn.Tanh(),
        )

    def forward(self, z):
        return self.up(self.fc(z).view(-1, 32, 4, 4))


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.utils.parametrizations.spectral_norm(nn.Conv2d(1, 16, 4, 2, 1)),
            nn.LeakyReLU(0.2, inplace=True),
            nn.utils.parametrizations.spectral_norm(nn.Conv2d(16, 32, 4, 2, 1)),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 1),
        )

    def forward(self, x):
        return self.main(x).squeeze(1)


def real_batch(n=16):
    x = torch.full((n, 1, 16, 16), -1.0)
    for i in range(n):
        r, c = torch.randint(2, 9, (2,)).tolist()
        x[i, 0, r : r + 5, c : c + 5] = 1.0
    return x


netG, netD = Generator(), Discriminator()
optG = torch.optim.Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999))
optD = torch.optim.Adam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
scaler = torch.amp.GradScaler("cpu")

for it in range(20):
    real = real_batch()
    z = torch.randn(len(real), LATENT)

    optD.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=torch.float16):
        fake = netG(z)
        d_real, d_fake = netD(real), netD(fake.detach())
        lossD = F.softplus(-d_real.float()).mean() + F.softplus(d_fake.float()).mean()
    scaler.scale(lossD).backward()
    scaler.step(optD)

    optG.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=torch.float16):
        lossG = F.softplus(-netD(fake).float()).mean()
    scaler.scale(lossG).backward()
    scaler.step(optG)
    scaler.update()
    if it % 5 == 4:
        print(f"[{it + 1}] D {lossD.item():.4f} G {lossG.item():.4f} scale {scaler.get_scale():.0f}")
