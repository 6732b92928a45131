import torch
import torch.nn as nn
import torch.nn.functional as F


class Encoder(nn.Module):
    def __init__(self, img_size=16, patch=4, dim=48, depth=2, heads=4):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, dim, patch, patch)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.zeros(1, (img_size // patch) ** 2, dim))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, heads, 2 * dim, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(dim)
        nn.init.trunc_normal_(self.mask_token, std=0.02)
        nn.init.trunc_normal_(self.pos_embed, std=0.02)

    def forward(self, x, mask):
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        w = mask.flatten(1).unsqueeze(-1).type_as(x)
        x = x * (1 - w) + self.mask_token * w + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return self.norm(x).transpose(1, 2)


class SimMIM(nn.Module):
    def __init__(self, encoder, dim=48, patch=4):
        super().__init__()
        self.encoder, self.patch = encoder, patch
        self.decoder = nn.Sequential(nn.Conv1d(dim, patch**2 * 3, 1))

    def forward(self, x, mask):
        z = self.decoder(self.encoder(x, mask))
        side = int(z.shape[-1] ** 0.5)
        x_rec = F.pixel_shuffle(z.unflatten(-1, (side, side)), self.patch)
        mask = mask.repeat_interleave(self.patch, 1).repeat_interleave(self.patch, 2).unsqueeze(1)
        loss_recon = F.l1_loss(x_rec.float(), x, reduction="none")
        return (loss_recon * mask).sum() / (mask.sum() + 1e-5) / 3
