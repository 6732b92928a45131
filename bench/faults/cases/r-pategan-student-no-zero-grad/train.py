"""PATE-GAN on a table: teachers vote on real or generated rows, a student learns from noisy votes, a generator fools it."""

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce


def discriminator(width):
    return nn.Sequential(nn.Linear(width, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))


def noisy_vote(teachers, rows, scale, generator):
    with torch.no_grad():
        votes = sum((teacher(rows).float() > 0).float() for teacher in teachers)
    uniform = torch.rand(votes.shape, generator=generator) - 0.5
    noise = -uniform.sign() * torch.log1p(-2 * uniform.abs() + 1e-6)  # Laplace
    return (votes + scale * noise > len(teachers) / 2).float()


class PateGan:
    def __init__(self, width=10, latent=6, n_teachers=3, batch=32):
        self.latent, self.batch = latent, batch
        self.generator = nn.Sequential(nn.Linear(latent, 32), nn.ReLU(), nn.Linear(32, width))
        self.student = discriminator(width)
        self.teachers = nn.ModuleList(discriminator(width) for _ in range(n_teachers))
        self.optimizer_g = torch.optim.SGD(self.generator.parameters(), lr=0.02)
        self.optimizer_s = torch.optim.SGD(self.student.parameters(), lr=0.02)
        self.optimizer_t = [torch.optim.SGD(t.parameters(), lr=0.05) for t in self.teachers]
        self.rng = torch.Generator().manual_seed(31)

    def fake(self):
        return self.generator(torch.randn(self.batch, self.latent, generator=self.rng))

    def train_teachers(self, parts):
        for teacher, optimizer, part in zip(self.teachers, self.optimizer_t, parts):
            real = part[torch.randint(len(part), (self.batch,), generator=self.rng)]
            with torch.autocast("cpu", dtype=torch.bfloat16):
                on_real, on_fake = teacher(real), teacher(self.fake().detach())
                loss = bce(on_real, torch.ones_like(on_real)) + bce(on_fake, torch.zeros_like(on_fake))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def train_student(self):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            rows = self.fake().detach()
            answer = noisy_vote(self.teachers, rows, 0.3, self.rng)
            loss_s = bce(self.student(rows).float(), answer)
        loss_s.backward()
        self.optimizer_s.step()
        return loss_s.item()

    def train_generator(self):
        for parameter in self.student.parameters():
            parameter.requires_grad_(False)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            score = self.student(self.fake())
            loss_g = bce(score, torch.ones_like(score))
        self.optimizer_g.zero_grad()
        loss_g.backward()
        self.optimizer_g.step()
        for parameter in self.student.parameters():
            parameter.requires_grad_(True)
        return loss_g.item()

    def fit(self, table, rounds=40):
        parts = table.chunk(len(self.teachers))
        for i in range(rounds):
            self.train_teachers(parts)
            loss_s, loss_g = self.train_student(), self.train_generator()
            if i % 8 == 0:
                print(f"round {i} student {loss_s:.4f} generator {loss_g:.4f}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(31)
    PateGan().fit(torch.randn(300, 4) @ torch.randn(4, 10) + 1.0)
