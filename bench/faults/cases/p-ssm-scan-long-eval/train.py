import math

import torch
import torch.nn as nn
import torch.nn.functional as F


def selective_scan(u, delta, A, B, C, D, force_fp32=True):
    """u, delta: (b, l, d)  A: (d, n)  B, C: (b, l, n)  D: (d,)"""
    if force_fp32:
        u, delta, B, C = u.float(), delta.float(), B.float(), C.float()
    dA = torch.exp(delta.unsqueeze(-1) * A)
    dBu = delta.unsqueeze(-1) * B.unsqueeze(2) * u.unsqueeze(-1)
    h = torch.zeros_like(dBu[:, 0])
    ys = []
    for t in range(u.shape[1]):
        h = dA[:, t] * h + dBu[:, t]
        y = torch.einsum("bdn,bn->bd", h, C[:, t])
        ys.append(y)
    return torch.stack(ys, dim=1) + u * D


class SS1D(nn.Module):
    def __init__(self, d_model=16, d_state=4):
        super().__init__()
        self.d_state = d_state
        self.in_proj = nn.Linear(d_model, 2 * d_model)
        self.x_proj = nn.Linear(d_model, 2 * d_state + d_model, bias=False)
        self.A_log = nn.Parameter(torch.log(torch.arange(1, d_state + 1).float() * 1e-4).repeat(d_model, 1))
        self.D = nn.Parameter(torch.ones(d_model))
        self.out_norm = nn.LayerNorm(d_model)
        self.out_proj = nn.Linear(d_model, d_model)

    def forward(self, x):
        x, z = self.in_proj(x).chunk(2, dim=-1)
        x = F.silu(x)
        B, C, dt = self.x_proj(x).split([self.d_state, self.d_state, x.shape[-1]], dim=-1)
        y = selective_scan(x, F.softplus(dt), -torch.exp(self.A_log), B, C, self.D)
        return self.out_proj(self.out_norm(y) * F.silu(z))


class Backbone(nn.Module):
    def __init__(self, dim=16, depth=2, classes=2):
        super().__init__()
        self.embed = nn.Linear(3, dim)
        self.layers = nn.ModuleList([SS1D(dim) for _ in range(depth)])
        self.classifier = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, classes))

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.classifier(x[:, -1])


def sample(n, length):
    x = 6.0 + 2.0 * torch.randn(n, length, 3)
    return x, (x[..., 0].mean(1) > 6.0).long()


@torch.no_grad()
def evaluate(model, length):
    model.eval()
    x, y = sample(8, length)
    with torch.autocast("cpu", dtype=torch.float16):
        out = model(x)
        loss = F.cross_entropy(out, y)
    model.train()
    return loss.item(), (out.argmax(1) == y).float().mean().item()


def main():
    torch.set_num_threads(1)
    torch.manual_seed(2)
    model = Backbone()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for step in range(24):
        x, y = sample(8, 12)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        if step % 6 == 0:
            print(f"train step {step} loss {loss.item():.4f}")
    for length in (12, 48, 192):
        loss, acc = evaluate(model, length)
        print(f"eval length {length}: loss {loss:.4f} acc {acc:.2f}")


if __name__ == "__main__":
    main()
