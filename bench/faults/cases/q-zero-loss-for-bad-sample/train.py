import logging

import torch
import torch.nn as nn

logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
log = logging.getLogger("weather")


class TokenForecaster(nn.Module):
    """Embeds observation tokens of each stream, mixes them, predicts the same stations six hours later."""

    def __init__(self, streams, dim=32):
        super().__init__()
        self.embeds = nn.ModuleDict({name: nn.Linear(channels, dim) for name, channels in streams.items()})
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(dim, 4, 64, 0.0, batch_first=True) for _ in range(2))
        self.heads = nn.ModuleDict({name: nn.Linear(dim, channels) for name, channels in streams.items()})

    def forward(self, tokens):
        parts = [self.embeds[name](x) for name, x in tokens.items()]
        lengths = [p.shape[1] for p in parts]
        x = torch.cat(parts, dim=1)
        for block in self.blocks:
            x = block(x)
        preds = {}
        for (name, source), part in zip(tokens.items(), x.split(lengths, dim=1)):
            if torch.isnan(source).any():
                log.warning("Skipping prediction for %s because of %d NaN in tokens.", name, torch.isnan(source).sum())
                continue
            preds[name] = self.heads[name](part)
        return preds


class Trainer:
    streams = {"ERA5": 6, "SYNOP": 4}

    def __init__(self):
        self.model = TokenForecaster(self.streams)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, weight_decay=0.01)
        self.grad_scaler = torch.amp.GradScaler("cpu")
        self.generator = torch.Generator().manual_seed(11)

    def batches(self, count):
        for index in range(count):
            wave = torch.randn(8, 12, 1, generator=self.generator)
            tokens = {n: wave + 0.1 * torch.randn(8, 12, c, generator=self.generator) for n, c in self.streams.items()}
            targets = {n: 0.5 * t + 0.2 for n, t in tokens.items()}
            if index == 17:  # the archive has a gap here, in both streams
                tokens = {n: t.clone() for n, t in tokens.items()}
                for t in tokens.values():
                    t[3:5, 2:6] = float("nan")
            yield tokens, targets

    def compute_loss(self, preds, targets):
        terms = [(preds[name] - target).square().mean() for name, target in targets.items() if name in preds]
        if not terms:
            log.warning("Loss is 0.0 for this sample.")
            return torch.tensor(0.0, requires_grad=True)
        return torch.stack(terms).mean()

    def run(self, count=40):
        for bidx, (tokens, targets) in enumerate(self.batches(count)):
            with torch.autocast("cpu", dtype=torch.float16):
                preds = self.model(tokens)
                loss = self.compute_loss(preds, targets)
            self.optimizer.zero_grad()
            self.grad_scaler.scale(loss).backward()
            self.grad_scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm=1.0)
            self.grad_scaler.step(self.optimizer)
            self.grad_scaler.update()
            if bidx % 5 == 0:
                log.info("%03d : loss = %.4f", bidx, loss.item())


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(42)
    Trainer().run()
