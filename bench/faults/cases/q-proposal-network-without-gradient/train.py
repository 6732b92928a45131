import functools

import torch

from nerf.model import NerfModel
from nerf.optimizers import OptimizerConfig, Optimizers


def next_rays(generator, count=64):
    origins = torch.rand(count, 3, generator=generator) * 2 - 1
    directions = torch.nn.functional.normalize(torch.randn(count, 3, generator=generator), dim=-1)
    target = torch.sigmoid(3 * (origins * directions))
    return origins, directions, target


def train_iteration(model, optimizers, grad_scaler, rays, step):
    optimizers.zero_grad_all()
    model.step = step
    origins, directions, target = rays
    with torch.autocast("cpu", dtype=torch.float16):
        outputs = model(origins, directions)
        loss_dict = model.get_loss_dict(outputs, target)
        loss = functools.reduce(torch.add, loss_dict.values())
    grad_scaler.scale(loss).backward()
    optimizers.optimizer_scaler_step_all(grad_scaler)
    grad_scaler.update()
    return loss, loss_dict


def main(max_num_iterations=60):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(5)
    model = NerfModel()
    optimizers = Optimizers(
        {"proposal_networks": OptimizerConfig(lr=1e-2), "fields": OptimizerConfig(lr=1e-2, max_norm=1.0)},
        model.get_param_groups(),
    )
    grad_scaler = torch.amp.GradScaler("cpu")
    for step in range(max_num_iterations):
        loss, loss_dict = train_iteration(model, optimizers, grad_scaler, next_rays(generator), step)
        if step % 4 == 0:
            print(step, f"{loss.item():.4f}", {k: f"{v.item():.5f}" for k, v in loss_dict.items()})


if __name__ == "__main__":
    main()
