"""A small masked autoencoder: a ViT encoder sees a quarter of the patches, a light decoder paints the rest."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class PatchEmbed(nn.Module):
    """Image to a row of patch tokens."""

    def __init__(self, img_size: int, patch_size: int, in_chans: int, embed_dim: int) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.num_patches = (img_size // patch_size) ** 2
        self.proj = nn.Conv2d(in_chans, embed_dim, kernel_size=patch_size, stride=patch_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).flatten(2).transpose(1, 2)


class Attention(nn.Module):
    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.scale = (dim // num_heads) ** -0.5
        self.qkv = nn.Linear(dim, dim * 3, bias=True)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]

        attn = (q @ k.transpose(-2, -1)) * self.scale
        attn = attn.softmax(dim=-1)

        x = (attn @ v).transpose(1, 2).reshape(B, N, C)
        return self.proj(x)


class Mlp(nn.Module):
    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden_dim)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class Block(nn.Module):
    def __init__(self, dim: int, num_heads: int, mlp_ratio: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = Attention(dim, num_heads)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = Mlp(dim, int(dim * mlp_ratio))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def sincos_pos_embed(dim: int, grid_size: int) -> Tensor:
    """Fixed 2-d position embedding, (1, 1 + grid_size**2, dim); the class token's is zero."""
    omega = 1.0 / 10000 ** (torch.arange(dim // 4, dtype=torch.float32) / (dim / 4))
    angles = torch.arange(grid_size, dtype=torch.float32)[:, None] * omega
    axis = torch.cat([angles.sin(), angles.cos()], dim=1)
    rows = axis[:, None, :].expand(grid_size, grid_size, -1)
    cols = axis[None, :, :].expand(grid_size, grid_size, -1)
    grid = torch.cat([rows, cols], dim=2).reshape(grid_size * grid_size, dim)
    return torch.cat([torch.zeros(1, dim), grid])[None]


class MaskedAutoencoderViT(nn.Module):
    def __init__(
        self,
        img_size: int = 48,
        patch_size: int = 8,
        in_chans: int = 3,
        embed_dim: int = 512,
        depth: int = 2,
        num_heads: int = 1,
        decoder_embed_dim: int = 64,
        decoder_depth: int = 1,
        decoder_num_heads: int = 2,
        mlp_ratio: float = 1.0,
    ) -> None:
        super().__init__()
        self.patch_embed = PatchEmbed(img_size, patch_size, in_chans, embed_dim)
        grid_size = img_size // patch_size
        self.cls_token = nn.Parameter(torch.zeros(1, 1, embed_dim))
        self.register_buffer("pos_embed", sincos_pos_embed(embed_dim, grid_size))
        self.blocks = nn.ModuleList(Block(embed_dim, num_heads, mlp_ratio) for _ in range(depth))
        self.norm = nn.LayerNorm(embed_dim)

        self.decoder_embed = nn.Linear(embed_dim, decoder_embed_dim)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, decoder_embed_dim))
        self.register_buffer("decoder_pos_embed", sincos_pos_embed(decoder_embed_dim, grid_size))
        self.decoder_blocks = nn.ModuleList(
            Block(decoder_embed_dim, decoder_num_heads, mlp_ratio) for _ in range(decoder_depth)
        )
        self.decoder_norm = nn.LayerNorm(decoder_embed_dim)
        self.decoder_pred = nn.Linear(decoder_embed_dim, patch_size**2 * in_chans)

        nn.init.normal_(self.cls_token, std=0.02)
        nn.init.normal_(self.mask_token, std=0.02)
        nn.init.xavier_uniform_(self.patch_embed.proj.weight.flatten(1))
        self.apply(self._init_weights)

    @staticmethod
    def _init_weights(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)

    def patchify(self, imgs: Tensor) -> Tensor:
        """(N, 3, H, W) to (N, L, patch_size**2 * 3)."""
        p = self.patch_embed.patch_size
        n, c, height, width = imgs.shape
        x = imgs.reshape(n, c, height // p, p, width // p, p)
        return torch.einsum("nchpwq->nhwpqc", x).reshape(n, -1, p * p * c)

    def random_masking(self, x: Tensor, mask_ratio: float) -> tuple[Tensor, Tensor, Tensor]:
        """Keep a random subset of each sample's patches. The mask is 1 where a patch was removed."""
        N, L, D = x.shape
        len_keep = int(L * (1 - mask_ratio))
        ids_shuffle = torch.argsort(torch.rand(N, L, device=x.device), dim=1)
        ids_restore = torch.argsort(ids_shuffle, dim=1)
        ids_keep = ids_shuffle[:, :len_keep]
        x_kept = torch.gather(x, 1, ids_keep[:, :, None].expand(-1, -1, D))
        mask = torch.ones(N, L, device=x.device)
        mask[:, :len_keep] = 0
        return x_kept, torch.gather(mask, 1, ids_restore), ids_restore

    def forward_encoder(self, imgs: Tensor, mask_ratio: float) -> tuple[Tensor, Tensor, Tensor]:
        x = self.patch_embed(imgs) + self.pos_embed[:, 1:]
        x, mask, ids_restore = self.random_masking(x, mask_ratio)
        cls_token = (self.cls_token + self.pos_embed[:, :1]).expand(x.shape[0], -1, -1)
        x = torch.cat([cls_token, x], dim=1)
        for block in self.blocks:
            x = block(x)
        return self.norm(x), mask, ids_restore

    def forward_decoder(self, x: Tensor, ids_restore: Tensor) -> Tensor:
        x = self.decoder_embed(x)
        missing = ids_restore.shape[1] + 1 - x.shape[1]
        mask_tokens = self.mask_token.to(x.dtype).expand(x.shape[0], missing, -1)
        patches = torch.cat([x[:, 1:], mask_tokens], dim=1)
        patches = torch.gather(patches, 1, ids_restore[:, :, None].expand(-1, -1, x.shape[2]))
        x = torch.cat([x[:, :1], patches], dim=1) + self.decoder_pos_embed
        for block in self.decoder_blocks:
            x = block(x)
        return self.decoder_pred(self.decoder_norm(x))[:, 1:]

    def forward_loss(self, imgs: Tensor, pred: Tensor, mask: Tensor) -> Tensor:
        """Mean squared error on the removed patches, each patch normalised by its own mean and variance."""
        target = self.patchify(imgs)
        mean = target.mean(dim=-1, keepdim=True)
        var = target.var(dim=-1, keepdim=True)
        target = (target - mean) / (var + 1.0e-6) ** 0.5
        loss = (pred - target) ** 2
        return (loss.mean(dim=-1) * mask).sum() / mask.sum()

    def forward(self, imgs: Tensor, mask_ratio: float = 0.75) -> tuple[Tensor, Tensor, Tensor]:
        latent, mask, ids_restore = self.forward_encoder(imgs, mask_ratio)
        pred = self.forward_decoder(latent, ids_restore)
        return self.forward_loss(imgs, pred, mask), pred, mask
