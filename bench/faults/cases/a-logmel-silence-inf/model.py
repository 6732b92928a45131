import torch.nn as nn


class ConvBlock(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.conv = nn.Conv1d(cin, cout, 5, padding=2)
        self.norm = nn.GroupNorm(4, cout)
        self.act = nn.GELU()

    def forward(self, x):
        x = self.conv(x)
        return self.act(self.norm(x))


class KeywordNet(nn.Module):
    def __init__(self, n_mels=20, width=32, classes=4):
        super().__init__()
        self.blocks = nn.ModuleList([ConvBlock(n_mels, width), ConvBlock(width, width)])
        self.head = nn.Linear(width, classes)

    def forward(self, mel):
        x = mel.transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(-1))
