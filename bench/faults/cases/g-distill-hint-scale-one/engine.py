import torch
import torch.nn.functional as F


class NativeScaler:
    def __init__(self, init_scale):
        self._scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=2000)

    def __call__(self, loss, optimizer, parameters, clip_grad=None):
        self._scaler.scale(loss).backward()
        if clip_grad is not None:
            self._scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(parameters, clip_grad)
        self._scaler.step(optimizer)
        self._scaler.update()

    def state_dict(self):
        return self._scaler.state_dict()


def train_one_epoch(student, teacher, loader, optimizer, loss_scaler, epoch, args):
    student.train()
    for i, (x, y) in enumerate(loader):
        with torch.autocast("cpu", dtype=torch.float16):
            with torch.no_grad():
                wanted = teacher.trunk(x)
            out = student(x)
            task = F.cross_entropy(out["logits"], y)
            hint = F.mse_loss(out["hint"], wanted)
            loss = task + args.hint_weight * hint
        optimizer.zero_grad()
        loss_scaler(loss, optimizer, student.parameters(), clip_grad=args.clip_grad)
        if i % args.print_freq == 0:
            print(f"Epoch [{epoch}] {i}/{len(loader)} task {task.item():.4f} hint {hint.item():.4f}")
