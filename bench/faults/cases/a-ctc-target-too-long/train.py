import random

import torch
import torch.nn as nn

ALPHABET = "-abcdefgh"  # 0 is the blank


class CRNN(nn.Module):
    def __init__(self, height=8, hidden=32):
        super().__init__()
        self.cnn = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d((2, 1)),
        )
        self.rnn = nn.GRU(32 * height // 4, hidden, bidirectional=True)
        self.fc = nn.Linear(2 * hidden, len(ALPHABET))

    def forward(self, images):
        f = self.cnn(images).flatten(1, 2).permute(2, 0, 1)
        f, _ = self.rnn(f)
        return self.fc(f).log_softmax(2)


def plate(rng, n, repeat=False):
    text = [rng.randrange(1, len(ALPHABET))]
    while len(text) < n:
        text.append(text[-1] if repeat else rng.choice([c for c in range(1, len(ALPHABET)) if c != text[-1]]))
    return text


def draw(text, width):
    img = torch.rand(1, 8, width) * 0.1
    for k, c in enumerate(text):
        x = k * width // len(text)
        img[0, c % 8, x : x + max(1, width // len(text))] += 1.0
    return img


def batches(steps, width=20, size=5):
    rng = random.Random(2)
    for i in range(steps):
        texts = [plate(rng, rng.randrange(3, 8)) for _ in range(size)]
        if i == 7:
            texts[1] = plate(rng, 7, repeat=True)  # "ccccccc": every repeat needs a blank between
        images = torch.stack([draw(t, width) for t in texts])
        yield images, torch.tensor(sum(texts, [])), torch.tensor([len(t) for t in texts])


torch.set_num_threads(1)
torch.manual_seed(0)
model = CRNN()
criterion = nn.CTCLoss(blank=0, reduction="mean")
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for i, (images, targets, target_lengths) in enumerate(batches(12)):
    log_probs = model(images)
    input_lengths = torch.full((images.shape[0],), log_probs.shape[0], dtype=torch.long)
    loss = criterion(log_probs, targets, input_lengths, target_lengths)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 5)
    optimizer.step()
    print(f"batch {i} ctc {loss.item():.4f}")
