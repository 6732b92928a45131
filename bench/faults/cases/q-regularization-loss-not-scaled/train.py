import math
from functools import partial

import torch
import torch.nn.functional as F

torch.set_num_threads(1)
torch.manual_seed(0)

FRAMES, FEATURES, HIDDEN, TOKENS = 40, 20, 48, 12
ORTHO, DECAY = 0.05, 2e-3


def init(*shape):
    return (torch.randn(*shape) / math.sqrt(shape[1])).requires_grad_()


params = {
    "conv.weight": (torch.randn(HIDDEN, FEATURES, 5) / math.sqrt(5 * FEATURES)).requires_grad_(),
    "conv.bias": torch.zeros(HIDDEN, requires_grad=True),
    "gate.weight": init(HIDDEN, HIDDEN),
    "value.weight": init(HIDDEN, HIDDEN),
    "out.weight": init(TOKENS, HIDDEN),
    "out.bias": torch.zeros(TOKENS, requires_grad=True),
}


def acoustic_model(params, x):
    h = F.relu(F.conv1d(x.transpose(1, 2), params["conv.weight"], params["conv.bias"], padding=2)).transpose(1, 2)
    h = h + torch.sigmoid(F.linear(h, params["gate.weight"])) * F.linear(h, params["value.weight"])
    return F.linear(h, params["out.weight"], params["out.bias"])


def regularizer(params):
    decay = sum(w.square().sum() for name, w in params.items() if name.endswith("weight"))
    gram = params["value.weight"] @ params["value.weight"].T
    return DECAY * decay + ORTHO * (gram - torch.eye(HIDDEN)).square().mean()


def utterances(batch, prototypes, generator):
    tokens = torch.randint(0, TOKENS, (batch, FRAMES // 4), generator=generator).repeat_interleave(4, dim=1)
    noise = torch.randn(batch, FRAMES, FEATURES, generator=generator)
    return prototypes[tokens] + 0.7 * noise, tokens


def main():
    generator = torch.Generator().manual_seed(1)
    batch = partial(utterances, 8, torch.randn(TOKENS, FEATURES, generator=generator), generator)
    optimizer = torch.optim.SGD(params.values(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu")
    for step in range(60):
        features, targets = batch()
        with torch.autocast("cpu", dtype=torch.float16):
            logits = acoustic_model(params, features)
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        reg_loss = regularizer(params)

        optimizer.zero_grad()
        scaler.scale(loss).backward()
        reg_loss.backward()
        scaler.step(optimizer)
        scaler.update()
        if step % 10 == 0:
            print(f"step {step:3d}  ce {loss.item():.4f}  reg {reg_loss.item():.4f}")


main()
