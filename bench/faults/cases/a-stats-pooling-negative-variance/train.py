import torch
import torch.nn.functional as F

from model import XVector


def utterances(steps, batch=8, frames=60):
    g = torch.Generator().manual_seed(12)
    voices = torch.randn(8, 20, generator=g) * 2
    for i in range(steps):
        spk = torch.randint(0, 8, (batch,), generator=g)
        feats = voices[spk][:, None] + torch.randn(batch, frames, 20, generator=g)
        if i == 10:
            feats[5] = -11.5129  # a file of zeros: every frame is the log floor
        yield feats, spk


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = XVector()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    running = None
    for i, (feats, spk) in enumerate(utterances(16)):
        logits, emb = model(feats)
        loss = F.cross_entropy(logits, spk) + 1e-3 * emb.pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 3.0)
        optimizer.step()
        running = loss.item() if running is None else 0.9 * running + 0.1 * loss.item()
        print("iter %d  loss %.4f  (avg %.4f)" % (i, loss.item(), running))


main()
