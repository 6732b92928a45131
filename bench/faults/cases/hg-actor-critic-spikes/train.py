"""Advantage actor-critic on a corridor with a rare, very large reward. The value loss jumps whenever it is found."""

import torch
from torch import nn


class Corridor:
    def __init__(self, n=24, length=12, seed=0):
        self.n, self.length = n, length
        self.g = torch.Generator().manual_seed(seed)
        self.pos = torch.zeros(n, dtype=torch.long)

    def observe(self):
        return torch.nn.functional.one_hot(self.pos, self.length).float()

    def step(self, action):
        self.pos = (self.pos + 2 * action - 1).clamp(0, self.length - 1)
        won = self.pos == self.length - 1
        jackpot = won & (torch.rand(self.n, generator=self.g) < 0.1)
        reward = torch.where(jackpot, 500.0, torch.where(won, 2.0, -0.01))
        self.pos = torch.where(won, 0, self.pos)
        return reward, won


class ActorCritic(nn.Module):
    def __init__(self, length, hidden=32):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(length, hidden), nn.Tanh())
        self.pi, self.v = nn.Linear(hidden, 2), nn.Linear(hidden, 1)

    def forward(self, obs):
        h = self.body(obs)
        return torch.distributions.Categorical(logits=self.pi(h)), self.v(h).squeeze(-1)


def rollout(env, net, length=16, gamma=0.97):
    obs, actions, rewards, dones = [], [], [], []
    with torch.no_grad():
        for _ in range(length):
            o = env.observe()
            a = net(o)[0].sample()
            r, d = env.step(a)
            obs.append(o), actions.append(a), rewards.append(r), dones.append(d)
        ret = net(env.observe())[1]
        returns = []
        for r, d in zip(reversed(rewards), reversed(dones)):
            ret = r + gamma * ret * (~d)
            returns.append(ret)
    return torch.stack(obs), torch.stack(actions), torch.stack(returns[::-1])


def main(updates=70):
    torch.set_num_threads(1)
    torch.manual_seed(4)
    env, net = Corridor(), ActorCritic(12)
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    seen = []
    for u in range(updates):
        obs, actions, returns = rollout(env, net)
        dist, value = net(obs)
        adv = (returns - value).detach()
        policy_loss = -(dist.log_prob(actions) * adv / (adv.std() + 1e-3)).mean()
        loss = policy_loss + 0.5 * (returns - value).pow(2).mean() - 0.01 * dist.entropy().mean()
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        opt.step()
        seen.append(loss.item())
        if u % 7 == 0:
            print(f"update {u} loss {loss.item():.3f} return {returns.mean().item():.3f}")
    print(f"final loss {seen[-1]:.4f}, between {min(seen):.3f} and {max(seen):.1f} on the way")


if __name__ == "__main__":
    main()
