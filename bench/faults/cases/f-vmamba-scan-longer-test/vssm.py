import torch
import torch.nn as nn
import torch.nn.functional as F


def selective_scan(u, delta, A, B, C, D):
    """Reference scan: u, delta (b, d, l); A (d, n); B, C (b, n, l). The caller hands over float32."""
    batch, dim, length = u.shape
    h = u.new_zeros(batch, dim, A.shape[1])
    decay = torch.exp(delta[..., None] * A[None, :, None])
    drive = (delta * u)[..., None] * B.transpose(1, 2)[:, None]
    out = []
    for t in range(length):
        h = decay[:, :, t] * h + drive[:, :, t]
        y = torch.einsum("bdn,bn->bd", h, C[:, :, t])
        out.append(y)
    return torch.stack(out, dim=-1) + u * D[:, None]


class SS2D(nn.Module):
    def __init__(self, dim, d_state=4, force_fp32=True):
        super().__init__()
        self.force_fp32 = force_fp32
        self.in_proj = nn.Linear(dim, dim)
        self.x_proj = nn.Linear(dim, dim + 2 * d_state)
        nn.init.normal_(self.x_proj.weight, std=1.5)
        self.d_state = d_state
        self.A_logs = nn.Parameter(torch.full((dim, d_state), -7.0))
        self.Ds = nn.Parameter(torch.ones(dim))
        self.out_norm = nn.LayerNorm(dim)
        self.out_proj = nn.Linear(dim, dim)

    def forward(self, x):
        b, h, w, d = x.shape
        xs = F.silu(self.in_proj(x)).view(b, h * w, d)
        dts, Bs, Cs = self.x_proj(xs).split([d, self.d_state, self.d_state], dim=-1)
        dts = F.softplus(dts)
        xs, dts, Bs, Cs = (t.transpose(1, 2) for t in (xs, dts, Bs, Cs))
        if self.force_fp32:
            xs, dts, Bs, Cs = xs.float(), dts.float(), Bs.float(), Cs.float()
        ys = selective_scan(xs, dts, -torch.exp(self.A_logs.float()), Bs, Cs, self.Ds.float())
        y = self.out_norm(ys.transpose(1, 2)).to(x.dtype)
        return self.out_proj(y).view(b, h, w, d)


class VSSBlock(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.op = SS2D(dim)

    def forward(self, x):
        return x + self.op(self.norm(x))


class VSSM(nn.Module):
    def __init__(self, dim=24, depths=(1, 1), classes=4, patch=4):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, dim, patch, patch)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"blocks": nn.ModuleList(VSSBlock(dim) for _ in range(depth))}) for depth in depths
        )
        self.head = nn.Linear(dim, classes)

    def forward(self, image):
        x = self.patch_embed(image).permute(0, 2, 3, 1)
        for layer in self.layers:
            for block in layer["blocks"]:
                x = block(x)
        return self.head(x.mean((1, 2)))
