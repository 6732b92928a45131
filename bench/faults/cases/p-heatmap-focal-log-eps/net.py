import torch
import torch.nn as nn


class KeypointNet(nn.Module):
    def __init__(self, ch=8):
        super().__init__()
        self.stem = nn.Conv2d(1, ch, 3, padding=1)
        self.conv = nn.Conv2d(ch, ch, 3, padding=1)
        self.heads = nn.ModuleDict({"hm": nn.Conv2d(ch, 1, 1), "wh": nn.Conv2d(ch, 2, 1)})
        self.heads["hm"].bias.data.fill_(-2.19)

    def forward(self, x):
        x = torch.relu(self.stem(x))
        x = torch.relu(self.conv(x))
        out = {name: head(x) for name, head in self.heads.items()}
        out["hm"] = out["hm"].sigmoid_()
        return out
