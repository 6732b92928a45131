"""Actor and critic of a bandit with separate optimizers; Lightning, manual optimisation, gradients clipped to norm 0.5."""

import logging
import warnings

import lightning as L
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader, Dataset

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Contexts(Dataset):
    def __init__(self, n=384, width=12, arms=4):
        g = torch.Generator().manual_seed(4)
        self.x = torch.randn(n, width, generator=g)
        self.pay = torch.sigmoid(self.x @ torch.randn(width, arms, generator=g))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"context": self.x[i], "pay": self.pay[i]}


class ActorCritic(L.LightningModule):
    max_norm = 0.5

    def __init__(self, width=12, arms=4):
        super().__init__()
        self.automatic_optimization = False
        self.actor = nn.Sequential(nn.Linear(width, 32), nn.Tanh(), nn.Linear(32, arms))
        self.critic = nn.Sequential(nn.Linear(width, 32), nn.Tanh(), nn.Linear(32, 1))

    def update(self, optimizer, loss):
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=self.max_norm, gradient_clip_algorithm="norm")
        optimizer.step()

    def training_step(self, batch, batch_idx):
        actor_opt, critic_opt = self.optimizers()
        policy = torch.distributions.Categorical(logits=self.actor(batch["context"]).float())
        arm = policy.sample()
        pay = batch["pay"].gather(1, arm[:, None])
        value = self.critic(batch["context"])
        advantage = (pay - value).detach().squeeze(1)
        actor_loss = -(policy.log_prob(arm) * advantage).mean() - 0.01 * policy.entropy().mean()
        critic_loss = nn.functional.mse_loss(value, pay)
        self.update(critic_opt, critic_loss)
        self.update(actor_opt, actor_loss)
        if batch_idx % 8 == 0:
            print(f"{batch_idx:3d} pay {pay.mean().item():.3f} critic {critic_loss.item():.4f}")

    def configure_optimizers(self):
        return [
            torch.optim.SGD(self.actor.parameters(), lr=0.3),
            torch.optim.SGD(self.critic.parameters(), lr=0.3),
        ]


if __name__ == "__main__":
    torch.set_num_threads(1)
    L.seed_everything(7, verbose=False)
    L.Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=4096.0)),
    ).fit(ActorCritic(), DataLoader(Contexts(), batch_size=16))
