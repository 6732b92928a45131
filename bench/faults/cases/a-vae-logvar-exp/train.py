import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
torch.manual_seed(0)


class TabularVAE(nn.Module):
    def __init__(self, dim=12, hidden=32, latent=4):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.mu = nn.Linear(hidden, latent)
        self.logvar = nn.Linear(hidden, latent)
        self.decoder = nn.Sequential(nn.Linear(latent, hidden), nn.Tanh(), nn.Linear(hidden, dim))

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        return mu + std * torch.randn_like(std)

    def forward(self, x):
        h = self.encoder(x)
        mu, logvar = self.mu(h), self.logvar(h)
        return self.decoder(self.reparameterize(mu, logvar)), mu, logvar


def loss_function(recon, x, mu, logvar, kld_weight=0.01):
    recon_loss = nn.functional.smooth_l1_loss(recon, x)
    kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp(), dim=1)
    return {"loss": recon_loss + kld_weight * kld.mean(), "recon": recon_loss.detach(), "kld": kld.mean().detach()}


def transactions(n=384):
    """Card transactions. The amount is what it is: a few are very large."""
    g = torch.Generator().manual_seed(6)
    x = torch.randn(n, 12, generator=g)
    x[:, 0] = torch.exp(1.2 * torch.randn(n, generator=g))
    x[230, 0] = 8000.0
    return x


model = TabularVAE()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
loader = DataLoader(TensorDataset(transactions()), batch_size=24)
for epoch in range(2):
    for i, (x,) in enumerate(loader):
        recon, mu, logvar = model(x)
        out = loss_function(recon, x, mu, logvar)
        optimizer.zero_grad()
        out["loss"].backward()
        optimizer.step()
        print(f"epoch {epoch} batch {i:2d} " + " ".join(f"{k} {v.item():.4g}" for k, v in out.items()))
