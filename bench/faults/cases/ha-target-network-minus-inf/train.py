"""Double DQN on a corridor with forbidden moves. The networks give -inf to moves that are not allowed."""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

SIZE, ACTIONS, GAMMA, TAU = 6, 4, 0.95, 0.05
MOVES = torch.tensor([[1, 0], [-1, 0], [0, 1], [0, -1]])


class QNet(nn.Module):
    def __init__(self, hidden=48):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.value, self.advantage = nn.Linear(hidden, 1), nn.Linear(hidden, ACTIONS)

    def forward(self, state, legal):
        h = self.body(state.float() / SIZE)
        adv = self.advantage(h)
        q = self.value(h) + adv - adv.mean(-1, keepdim=True)
        return q.masked_fill(~legal, float("-inf"))


def legal_moves(state):
    target = state[:, None] + MOVES
    return ((target >= 0) & (target < SIZE)).all(-1)


class Replay:
    def __init__(self, n=600):
        self.state = torch.randint(0, SIZE, (n, 2))
        legal = legal_moves(self.state)
        self.action = torch.multinomial(legal.float(), 1).squeeze(1)
        self.next = self.state + MOVES[self.action]
        self.done = (self.next == SIZE - 1).all(-1)
        self.reward = self.done.float() - 0.01

    def sample(self, n=32):
        i = torch.randint(0, len(self.state), (n,))
        return self.state[i], self.action[i], self.reward[i], self.next[i], self.done[i]


@torch.no_grad()
def soft_update(target, online):
    for t, o in zip(target.parameters(), online.parameters()):
        t.lerp_(o, TAU)


def main():
    torch.set_num_threads(1)
    torch.manual_seed(3)
    online = QNet()
    target = copy.deepcopy(online).requires_grad_(False)
    optimizer = torch.optim.Adam(online.parameters(), lr=1e-3)
    replay = Replay()
    for step in range(80):
        s, a, r, s2, done = replay.sample()
        with torch.no_grad():
            legal = legal_moves(s2)
            best = online(s2, legal).argmax(-1, keepdim=True)
            q_next = target(s2, legal).gather(1, best).squeeze(1)
            y = r + GAMMA * q_next.masked_fill(done, 0.0)
        q = online(s, legal_moves(s)).gather(1, a[:, None]).squeeze(1)
        loss = F.smooth_l1_loss(q, y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(online.parameters(), 10.0)
        optimizer.step()
        soft_update(target, online)
        if step % 20 == 19:
            print(f"step {step + 1} td loss {loss.item():.5f} mean q {q.mean().item():.4f}")


if __name__ == "__main__":
    main()
