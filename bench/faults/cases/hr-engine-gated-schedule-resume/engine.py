"""One epoch of mixed-precision training: the scaler as an object, and a schedule that waits for real updates."""

import math

import torch


class NativeScaler:
    state_dict_key = "amp_scaler"

    def __init__(self, device="cpu", **kwargs):
        self._scaler = torch.amp.GradScaler(device, **kwargs)

    def __call__(self, loss, optimizer, clip_grad=None, parameters=None, need_update=True):
        """Returns the gradient norm and whether the weights were updated; (None, False) inside a window."""
        self._scaler.scale(loss).backward()
        if not need_update:
            return None, False
        self._scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(parameters, math.inf if clip_grad is None else clip_grad)
        before = self._scaler.get_scale()
        self._scaler.step(optimizer)
        self._scaler.update()
        return norm, self._scaler.get_scale() >= before

    def state_dict(self):
        return self._scaler.state_dict()

    def load_state_dict(self, state):
        self._scaler.load_state_dict(state)


def train_one_epoch(model, loader, criterion, optimizer, loss_scaler, scheduler, accum_steps=1, clip_grad=1.0):
    model.train()
    optimizer.zero_grad()
    losses, norms, updates = [], [], 0
    for i, (x, y) in enumerate(loader):
        last = (i + 1) % accum_steps == 0 or i + 1 == len(loader)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = criterion(model(x).float(), y) / accum_steps
        norm, updated = loss_scaler(loss, optimizer, clip_grad, model.parameters(), need_update=last)
        losses.append(loss.item() * accum_steps)
        if last:
            optimizer.zero_grad()
        if updated:
            scheduler.step()
            norms.append(norm.item())
            updates += 1
    return sum(losses) / len(losses), sum(norms) / max(len(norms), 1), updates


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    right = total = 0
    for x, y in loader:
        with torch.autocast("cpu", dtype=torch.float16):
            right += (model(x).argmax(1) == y).sum().item()
        total += len(y)
    return right / total
