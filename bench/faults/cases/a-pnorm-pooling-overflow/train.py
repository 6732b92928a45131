import torch
import torch.nn.functional as F

from net import Retrieval


class Annealer:
    def __init__(self, pool, factor=2.0, every=3):
        self.pool, self.factor, self.every, self.n = pool, factor, every, 0

    def step(self):
        self.n += 1
        if self.n % self.every == 0:
            self.pool.p *= self.factor


def pairs(n):
    g = torch.Generator().manual_seed(3)
    for _ in range(n):
        a = torch.randn(8, 3, 24, 24, generator=g)
        yield a, a + 0.3 * torch.randn(a.shape, generator=g)


def info_nce(a, b, t=0.2):
    sim = a @ b.t() / t
    return F.cross_entropy(sim, torch.arange(len(a)))


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = Retrieval()
    opt = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9, nesterov=True)
    annealer = Annealer(net.pool)
    for step, (a, b) in enumerate(pairs(24)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            za, zb = net(a), net(b)
        loss = info_nce(za.float(), zb.float())
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        annealer.step()
        print(f"step {step} p {net.pool.p:g} loss {loss.item():.4f}")
