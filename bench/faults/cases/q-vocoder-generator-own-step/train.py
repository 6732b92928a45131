import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm


class ResBlock(nn.Module):
    def __init__(self, channels, dilations=(1, 3)):
        super().__init__()
        self.convs = nn.ModuleList(
            weight_norm(nn.Conv1d(channels, channels, 3, dilation=d, padding=d)) for d in dilations
        )

    def forward(self, x):
        for conv in self.convs:
            x = x + conv(F.leaky_relu(x, 0.1))
        return x


class Generator(nn.Module):
    def __init__(self, mels=16, channels=32):
        super().__init__()
        self.conv_pre = weight_norm(nn.Conv1d(mels, channels, 7, padding=3))
        self.ups = nn.ModuleList(
            weight_norm(nn.ConvTranspose1d(channels // 2**i, channels // 2 ** (i + 1), 8, 4, 2)) for i in range(2)
        )
        self.resblocks = nn.ModuleList(ResBlock(channels // 2 ** (i + 1)) for i in range(2))
        self.conv_post = weight_norm(nn.Conv1d(channels // 4, 1, 7, padding=3))

    def forward(self, mel):
        x = self.conv_pre(mel)
        for up, block in zip(self.ups, self.resblocks):
            x = block(up(F.leaky_relu(x, 0.1)))
        return torch.tanh(self.conv_post(F.leaky_relu(x)))


class PeriodDiscriminator(nn.Module):
    def __init__(self, period):
        super().__init__()
        self.period = period
        self.convs = nn.ModuleList([nn.Conv2d(1, 8, (5, 1), (3, 1)), nn.Conv2d(8, 16, (5, 1), (3, 1))])
        self.post = nn.Conv2d(16, 1, (3, 1))

    def forward(self, x):
        b, c, t = x.shape
        x = x[..., : t - t % self.period].reshape(b, c, -1, self.period)
        fmap = []
        for conv in self.convs:
            x = F.leaky_relu(conv(x), 0.1)
            fmap.append(x)
        return self.post(x).flatten(1), fmap


class MultiPeriodDiscriminator(nn.Module):
    def __init__(self, periods=(2, 3)):
        super().__init__()
        self.discriminators = nn.ModuleList(PeriodDiscriminator(p) for p in periods)

    def forward(self, y):
        return [d(y) for d in self.discriminators]


def discriminator_loss(real, fake):
    return sum((1 - r.float()).square().mean() + f.float().square().mean() for (r, _), (f, _) in zip(real, fake))


def generator_loss(real, fake):
    adv = sum((1 - f.float()).square().mean() for f, _ in fake)
    feat = sum(F.l1_loss(a.detach(), b) for (_, ra), (_, fa) in zip(real, fake) for a, b in zip(ra, fa))
    return adv, 2 * feat


def batches(n, generator, segment=32):
    basis = torch.linspace(0.02, 0.4, 16)
    for _ in range(n):
        mel = torch.rand(6, 16, segment, generator=generator) * (torch.rand(6, 16, 1, generator=generator) < 0.3)
        t = torch.arange(segment * 16)
        wave = (mel.repeat_interleave(16, -1) * torch.sin(basis[:, None] * t)).sum(1, keepdim=True)
        yield mel, torch.tanh(0.3 * wave)


def train(args):
    net_g, net_d = Generator(), MultiPeriodDiscriminator()
    optim_g = torch.optim.AdamW(net_g.parameters(), args.lr, betas=(0.8, 0.99))
    optim_d = torch.optim.AdamW(net_d.parameters(), args.lr, betas=(0.8, 0.99))
    scaler = torch.amp.GradScaler("cpu", init_scale=args.init_scale)
    generator = torch.Generator().manual_seed(args.seed)
    for global_step, (mel, wave) in enumerate(batches(args.steps, generator)):
        with torch.autocast("cpu", dtype=torch.float16):
            y_hat = net_g(mel)
            loss_disc = discriminator_loss(net_d(wave), net_d(y_hat.detach()))
        optim_d.zero_grad()
        scaler.scale(loss_disc).backward()
        scaler.step(optim_d)

        with torch.autocast("cpu", dtype=torch.float16):
            real, fake = net_d(wave), net_d(y_hat)
            loss_adv, loss_fm = generator_loss(real, fake)
            loss_mel = F.l1_loss(F.avg_pool1d(y_hat.float().abs(), 16), F.avg_pool1d(wave.abs(), 16))
            loss_gen_all = loss_adv + loss_fm + 10 * loss_mel
        optim_g.zero_grad()
        scaler.scale(loss_gen_all).backward()
        optim_g.step()
        scaler.update()

        if global_step % 5 == 0:
            print(
                f"[{global_step}] loss_disc={loss_disc.item():.3f} loss_gen={loss_adv.item():.3f} "
                f"loss_fm={loss_fm.item():.3f} loss_mel={loss_mel.item():.3f}"
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--init-scale", type=float, default=4096.0)
    parser.add_argument("--seed", type=int, default=1234)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    train(args)
