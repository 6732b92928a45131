import argparse

import torch
import torch.nn as nn

parser = argparse.ArgumentParser()
parser.add_argument("--n_iterations", type=int, default=60)
parser.add_argument("--batch_size", type=int, default=32)
parser.add_argument("--lr", type=float, default=5e-4)
parser.add_argument("--latent_dim", type=int, default=8)
parser.add_argument("--n_critic", type=int, default=5, help="number of training steps for discriminator per iter")
parser.add_argument("--clip_value", type=float, default=0.2, help="lower and upper clip value for disc. weights")
opt = parser.parse_args()
print(opt)

torch.set_num_threads(1)
torch.manual_seed(0)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()

        def block(in_feat, out_feat, normalize=True):
            layers = [nn.Linear(in_feat, out_feat)]
            if normalize:
                layers.append(nn.BatchNorm1d(out_feat, 0.8))
            layers.append(nn.LeakyReLU(0.2, inplace=True))
            return layers

        self.model = nn.Sequential(
            *block(opt.latent_dim, 32, normalize=False), *block(32, 64), nn.Linear(64, 2), nn.Tanh()
        )

    def forward(self, z):
        return self.model(z)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(
            nn.Linear(2, 64), nn.LeakyReLU(0.2, inplace=True), nn.Linear(64, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1)
        )

    def forward(self, x):
        return self.model(x)


def ring(n):
    angle = torch.randint(0, 8, (n,)) * (2 * torch.pi / 8)
    return 0.7 * torch.stack([angle.cos(), angle.sin()], 1) + 0.03 * torch.randn(n, 2)


generator, discriminator = Generator(), Discriminator()
optimizer_G = torch.optim.RMSprop(generator.parameters(), lr=opt.lr)
optimizer_D = torch.optim.RMSprop(discriminator.parameters(), lr=opt.lr)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13)

for i in range(opt.n_iterations):
    real_imgs = ring(opt.batch_size)
    optimizer_D.zero_grad()
    z = torch.randn(opt.batch_size, opt.latent_dim)
    with torch.autocast("cpu", dtype=torch.float16):
        fake_imgs = generator(z).detach()
        loss_D = -discriminator(real_imgs).float().mean() + discriminator(fake_imgs).float().mean()
    scaler.scale(loss_D).backward()
    scaler.step(optimizer_D)
    with torch.no_grad():
        for p in discriminator.parameters():
            p.clamp_(-opt.clip_value, opt.clip_value)

    # Train the generator every n_critic iterations
    if i % opt.n_critic == 0:
        optimizer_G.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            gen_imgs = generator(z)
            loss_G = -discriminator(gen_imgs).float().mean()
        scaler.scale(loss_G).backward()
        scaler.step(optimizer_G)
    scaler.update()

    if i % 10 == 0:
        print(f"[Batch {i}/{opt.n_iterations}] [D loss: {loss_D.item():.6f}] [G loss: {loss_G.item():.6f}]")
