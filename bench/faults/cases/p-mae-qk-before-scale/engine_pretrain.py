import math
import sys

import torch


def train_one_epoch(model, data_loader, optimizer, epoch, loss_scaler, args):
    model.train(True)
    optimizer.zero_grad()
    for it, samples in enumerate(data_loader):
        with torch.autocast("cpu", dtype=torch.float16):
            loss, _, _ = model(samples, mask_ratio=args.mask_ratio)

        loss_value = loss.item()
        if not math.isfinite(loss_value):
            print("Loss is {}, stopping training".format(loss_value))
            sys.exit(1)

        loss_scaler(loss, optimizer, parameters=list(model.parameters()), update_grad=True)
        optimizer.zero_grad()
        if it % 5 == 0:
            print(
                f"Epoch: [{epoch}]  [{it:3d}/{len(data_loader)}]  loss: {loss_value:.4f}  lr: {optimizer.param_groups[0]['lr']:g}"
            )
