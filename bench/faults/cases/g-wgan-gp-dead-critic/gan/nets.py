from torch import nn


class Generator(nn.Sequential):
    def __init__(self, z=4, hidden=32):
        super().__init__(nn.Linear(z, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 2))


class Critic(nn.Module):
    def __init__(self, hidden=6):
        super().__init__()
        self.h1 = nn.Linear(2, hidden)
        self.h2 = nn.Linear(hidden, hidden)
        self.score = nn.Linear(hidden, 1)
        self.relu = nn.ReLU()

    def forward(self, x):
        x = self.relu(self.h1(x))
        x = self.relu(self.h2(x))
        return self.score(x)
