import argparse
import logging

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import optim
from torch.utils.data import DataLoader, Dataset, random_split

from unet import UNet


class ShapesDataset(Dataset):
    def __init__(self, count=72, size=24, classes=3):
        g = torch.Generator().manual_seed(0)
        self.items = []
        for _ in range(count):
            mask = torch.zeros(size, size, dtype=torch.long)
            for c in range(1, classes):
                r, q = torch.randint(0, size - 8, (2,), generator=g).tolist()
                mask[r : r + 8, q : q + 8] = c
            image = F.one_hot(mask, classes).permute(2, 0, 1).float() + 0.8 * torch.randn(3, size, size, generator=g)
            self.items.append({"image": image, "mask": mask})

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


def dice_loss(logits, masks, n_classes, eps=1e-6):
    probs = F.softmax(logits.float(), dim=1)
    target = F.one_hot(masks, n_classes).permute(0, 3, 1, 2).float()
    inter = 2 * (probs * target).sum((0, 2, 3))
    sets = probs.sum((0, 2, 3)) + target.sum((0, 2, 3))
    return 1 - ((inter + eps) / (sets + eps)).mean()


@torch.inference_mode()
def evaluate(net, loader, amp):
    net.eval()
    right = total = 0
    for batch in loader:
        with torch.autocast("cpu", dtype=torch.float16, enabled=amp):
            pred = net(batch["image"]).argmax(1)
        right += (pred == batch["mask"]).sum().item()
        total += pred.numel()
    net.train()
    return right / total


def train_model(
    model,
    epochs=2,
    batch_size=4,
    learning_rate=1e-5,
    amp=False,
    weight_decay=1e-8,
    momentum=0.9,
    gradient_clipping=1.0,
):
    dataset = ShapesDataset()
    train_set, val_set = random_split(dataset, [60, 12], generator=torch.Generator().manual_seed(0))
    train_loader = DataLoader(train_set, shuffle=True, batch_size=batch_size)
    val_loader = DataLoader(val_set, batch_size=batch_size)
    optimizer = optim.RMSprop(model.parameters(), lr=learning_rate, weight_decay=weight_decay, momentum=momentum)
    scheduler = optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", patience=5)
    grad_scaler = torch.amp.GradScaler("cpu", enabled=amp)
    criterion = nn.CrossEntropyLoss()
    global_step = 0

    for epoch in range(1, epochs + 1):
        model.train()
        epoch_loss = 0
        for batch in train_loader:
            images, true_masks = batch["image"], batch["mask"]
            with torch.autocast("cpu", dtype=torch.float16, enabled=amp):
                masks_pred = model(images)
                loss = criterion(masks_pred, true_masks)
                loss += dice_loss(masks_pred, true_masks, 3)

            optimizer.zero_grad(set_to_none=True)
            grad_scaler.scale(loss).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), gradient_clipping)
            grad_scaler.step(optimizer)
            grad_scaler.update()

            global_step += 1
            epoch_loss += loss.item()
        val_score = evaluate(model, val_loader, amp)
        scheduler.step(val_score)
        logging.info(f"epoch {epoch} loss {epoch_loss / len(train_loader):.4f} validation accuracy {val_score:.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train the UNet on images and target masks")
    parser.add_argument("--epochs", "-e", type=int, default=2)
    parser.add_argument("--batch-size", "-b", type=int, default=4)
    parser.add_argument("--learning-rate", "-l", type=float, default=1e-4)
    parser.add_argument("--amp", action="store_true", default=False, help="Use mixed precision")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    train_model(UNet(), args.epochs, args.batch_size, args.learning_rate, args.amp)
