import torch
import torch.nn as nn


def window_partition(x, window):
    b, h, w, c = x.shape
    x = x.view(b, h // window, window, w // window, window, c)
    return x.permute(0, 1, 3, 2, 4, 5).reshape(-1, window * window, c)


def window_reverse(windows, window, h, w):
    b = windows.shape[0] // (h * w // window // window)
    x = windows.view(b, h // window, w // window, window, window, -1)
    return x.permute(0, 1, 3, 2, 4, 5).reshape(b, h, w, -1)


class Mlp(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.act = nn.ReLU()
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x):
        x = self.fc1(x)
        x = self.act(x)
        x = self.fc2(x)
        return x


class WindowAttention(nn.Module):
    def __init__(self, dim, heads, window):
        super().__init__()
        self.heads, self.scale = heads, (dim // heads) ** -0.5
        self.relative_position_bias = nn.Parameter(torch.zeros(heads, window**2, window**2))
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        attn = (q * self.scale) @ k.transpose(-2, -1)
        attn = (attn + self.relative_position_bias).softmax(dim=-1)
        return self.proj((attn @ v).transpose(1, 2).reshape(b, n, c))


class SwinBlock(nn.Module):
    def __init__(self, dim, heads, window, shift, ratio):
        super().__init__()
        self.window, self.shift = window, shift
        self.norm1 = nn.LayerNorm(dim)
        self.attn = WindowAttention(dim, heads, window)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = Mlp(dim, ratio * dim)

    def forward(self, x):
        _, h, w, _ = x.shape
        shortcut = x
        x = self.norm1(x)
        if self.shift:
            x = torch.roll(x, (-self.shift, -self.shift), (1, 2))
        x = window_reverse(self.attn(window_partition(x, self.window)), self.window, h, w)
        if self.shift:
            x = torch.roll(x, (self.shift, self.shift), (1, 2))
        x = shortcut + x
        return x + self.mlp(self.norm2(x))


class PatchMerging(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(4 * dim)
        self.reduction = nn.Linear(4 * dim, 2 * dim, bias=False)

    def forward(self, x):
        x = torch.cat([x[:, i::2, j::2] for j in (0, 1) for i in (0, 1)], -1)
        return self.reduction(self.norm(x))


class BasicLayer(nn.Module):
    def __init__(self, dim, depth, heads, window, ratio, downsample):
        super().__init__()
        self.blocks = nn.ModuleList(
            SwinBlock(dim, heads, window, 0 if i % 2 == 0 else window // 2, ratio) for i in range(depth)
        )
        self.downsample = PatchMerging(dim) if downsample else None

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x if self.downsample is None else self.downsample(x)


class SwinTransformer(nn.Module):
    def __init__(self, classes=10, dim=32, depths=(2, 2), heads=(2, 4), window=4, ratio=8):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, dim, 4, 4)
        self.layers = nn.ModuleList(
            BasicLayer(dim * 2**i, depth, heads[i], window, ratio, downsample=i + 1 < len(depths))
            for i, depth in enumerate(depths)
        )
        self.norm = nn.LayerNorm(dim * 2 ** (len(depths) - 1))
        self.head = nn.Linear(self.norm.normalized_shape[0], classes)

    def forward(self, x):
        x = self.patch_embed(x).permute(0, 2, 3, 1)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x).mean((1, 2)))
