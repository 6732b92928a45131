import torch.nn as nn


class EmbeddingNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.convnet = nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.PReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3), nn.PReLU(), nn.MaxPool2d(2)
        )
        self.fc = nn.Sequential(nn.Linear(16 * 2 * 2, 48), nn.PReLU(), nn.Linear(48, 8))

    def forward(self, x):
        return self.fc(self.convnet(x).flatten(1))


class SiameseNet(nn.Module):
    def __init__(self, embedding_net):
        super().__init__()
        self.embedding_net = embedding_net

    def forward(self, x1, x2):
        return self.embedding_net(x1), self.embedding_net(x2)

    def get_embedding(self, x):
        return self.embedding_net(x)
