import torch
import torch.nn.functional as F

from .amp import MixedPrecision
from .model import Conformerish

LOG_GRADS_EVERY = 10


def synthetic_batches(steps, seed=3):
    g = torch.Generator().manual_seed(seed)
    sounds = torch.randn(15, 20, generator=g)
    for _ in range(steps):
        text = torch.randint(1, 15, (6, 5), generator=g)
        frames = sounds[text].repeat_interleave(8, dim=1)
        yield frames + 0.3 * torch.randn(frames.shape, generator=g), text


def gradient_report(model, top=3):
    norms = {name: p.grad.norm().item() for name, p in model.named_parameters() if p.grad is not None}
    largest = sorted(norms, key=norms.get, reverse=True)[:top]
    return ", ".join(f"{name} {norms[name]:.4f}" for name in largest)


def main(steps=40):
    torch.set_num_threads(1)
    torch.manual_seed(3)
    model = Conformerish()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    amp = MixedPrecision()
    for step, (feats, text) in enumerate(synthetic_batches(steps), start=1):
        with amp.autocast():
            log_probs = model(feats).float().log_softmax(-1).transpose(0, 1)
        lengths = torch.full((len(text),), log_probs.shape[0])
        loss = F.ctc_loss(log_probs, text, lengths, torch.full((len(text),), text.shape[1]))
        optimizer.zero_grad(set_to_none=True)
        amp.backward(loss)
        if step % LOG_GRADS_EVERY == 0:
            amp.unscale(optimizer)
            print("  gradients:", gradient_report(model))
        norm = amp.clip_and_step(optimizer)
        if step % 3 == 0:
            print(f"{step}: loss_ctc={loss.item():.3f} grad_norm={norm:.3f}")


if __name__ == "__main__":
    main()
