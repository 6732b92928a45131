import argparse

import torch

from policy import TinyPolicy, generate, per_token_logps

PAD, EOS = 0, 1


class GRPO:
    def __init__(self, args):
        self.args = args
        self.g = torch.Generator().manual_seed(args.seed)
        self.model = TinyPolicy()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr)

    def reward(self, completions, mask):
        """Wants even tokens, and not too many of them."""
        good = ((completions % 2 == 0).float() * mask).sum(1)
        return good - 0.15 * mask.sum(1)

    def rollout(self):
        prompts = torch.randint(2, 24, (self.args.prompts, 4), generator=self.g).repeat_interleave(self.args.group, 0)
        ids, mask = generate(self.model, prompts, self.args.max_new, EOS, PAD, self.g)
        rewards = self.reward(ids[:, -self.args.max_new :], mask).view(self.args.prompts, self.args.group)
        adv = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
        with torch.no_grad():
            old = per_token_logps(self.model, ids, self.args.max_new)
        # what the sampler returns for positions after the end of a completion
        old = torch.where(mask.bool(), old, torch.tensor(self.args.pad_logprob))
        return ids, mask, adv.flatten(), old

    def compute_loss(self, ids, mask, adv, old):
        logps = per_token_logps(self.model, ids, self.args.max_new)
        log_ratio = logps - old
        coef_1 = torch.exp(log_ratio)
        coef_2 = torch.clamp(coef_1, 1 - self.args.epsilon, 1 + self.args.epsilon)
        per_token_loss = -torch.min(coef_1 * adv[:, None], coef_2 * adv[:, None])
        return per_token_loss[mask.bool()].mean()

    def train(self):
        for step in range(self.args.steps):
            batch = self.rollout()
            for _ in range(self.args.num_iterations):
                loss = self.compute_loss(*batch)
                self.optimizer.zero_grad()
                loss.backward()
                norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
            if not torch.isfinite(norm):
                print(f"step {step}: grad_norm {norm.item()}, stopping")
                return
            if step % 4 == 0:
                length = batch[1].sum(1).mean().item()
                print({"step": step, "loss": round(loss.item(), 4), "grad_norm": round(norm.item(), 4), "len": length})


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--prompts", type=int, default=2)
    p.add_argument("--group", type=int, default=4)
    p.add_argument("--max-new", type=int, default=12)
    p.add_argument("--num-iterations", type=int, default=2)
    p.add_argument("--steps", type=int, default=30)
    p.add_argument("--epsilon", type=float, default=0.2)
    p.add_argument("--pad-logprob", type=float, default=-1000.0)
    p.add_argument("--lr", type=float, default=3e-3)
    p.add_argument("--seed", type=int, default=0)
    return p.parse_args()


if __name__ == "__main__":
    torch.set_num_threads(1)
    args = parse()
    torch.manual_seed(args.seed)
    GRPO(args).train()
