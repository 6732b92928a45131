import torch
from torch.utils.data import Dataset

from config import TrainConfig
from trainer import BaseTrainer


class Boxes(Dataset):
    def __init__(self, count=75, size=16):
        g = torch.Generator().manual_seed(6)
        self.rows = []
        for _ in range(count):
            w, h = torch.randint(3, 7, (2,), generator=g).tolist()
            x, y = (int(torch.randint(0, size - s, (1,), generator=g)) for s in (w, h))
            image = 0.2 * torch.randn(1, size, size, generator=g)
            image[0, y : y + h, x : x + w] += 1
            cell = (y + h // 2) // 4 * (size // 4) + (x + w // 2) // 4
            self.rows.append((image, {"cell": torch.tensor(cell), "wh": torch.tensor([w / size, h / size])}))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


if __name__ == "__main__":
    torch.set_num_threads(1)
    config = TrainConfig()
    torch.manual_seed(config.seed)
    BaseTrainer(config, Boxes()).fit()
