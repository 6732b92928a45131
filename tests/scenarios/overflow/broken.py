"""A variational autoencoder whose log-variance runs away: exp(200) is beyond float32."""

import torch
from torch import nn

torch.manual_seed(0)


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(6, 4)
        self.decoder = nn.Linear(2, 6)

    def forward(self, x):
        mean, log_variance = self.encoder(x).chunk(2, dim=-1)
        sample = mean + torch.randn_like(mean) * (0.5 * log_variance).clamp(max=5).exp()
        return self.decoder(sample), mean, log_variance


def loss_of(reconstruction, x, mean, log_variance):
    variance = log_variance.exp()  # <- here
    kl = -0.5 * (1 + log_variance - mean.pow(2) - variance).sum(-1).mean()
    return nn.functional.mse_loss(reconstruction, x) + kl


model = VAE()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(3):
    x = torch.randn(8, 6)
    if step == 1:
        x[3] = 400.0 * model.encoder.weight[2].detach().sign()
    reconstruction, mean, log_variance = model(x)
    loss = loss_of(reconstruction, x, mean, log_variance)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
