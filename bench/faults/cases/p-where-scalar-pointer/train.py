import torch

from policy import PointerPolicy


class Shop:
    def __init__(self, envs=8, jobs=6, seed=0):
        self.g = torch.Generator().manual_seed(seed)
        self.envs, self.n = envs, jobs
        self.feat = torch.randn(envs, jobs, 4, generator=self.g)
        self.machine = torch.randn(envs, 4, generator=self.g)
        self.open = torch.ones(envs, jobs, dtype=torch.bool)

    def step(self, action):
        reward = self.feat.gather(1, action[..., None].expand(-1, 1, 4))[:, 0, 0]
        # breakdowns close a second job now and then
        self.open.scatter_(1, action, False)
        broken = torch.randint(0, self.n, (self.envs, 1), generator=self.g)
        hit = torch.rand(self.envs, 1, generator=self.g) < 0.15
        self.open.scatter_(1, broken, self.open.gather(1, broken) & ~hit)
        # new jobs arrive
        new = torch.rand(self.envs, self.n, generator=self.g) < 0.16
        self.open |= new
        return reward


def main():
    torch.set_num_threads(1)
    torch.manual_seed(1)
    env, policy = Shop(seed=6), PointerPolicy()
    opt = torch.optim.Adam(policy.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    baseline = 0.0
    for t in range(60):
        with torch.autocast("cpu", dtype=torch.float16):
            d = policy(env.feat, env.machine, env.open.clone())
        reward = env.step(d.action)
        baseline = 0.9 * baseline + 0.1 * reward.mean().item()
        loss = -((reward - baseline) * d.log_prob.float()).mean() - 0.01 * d.entropy.float().mean()
        opt.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        if t % 10 == 9:
            print(f"t={t + 1} loss={loss.item():.4f} baseline={baseline:.3f} open={env.open.float().mean().item():.2f}")


if __name__ == "__main__":
    main()
