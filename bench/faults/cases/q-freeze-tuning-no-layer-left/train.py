import argparse

import torch
from torch.utils.data import DataLoader, Dataset

from modeling import GLMModel


class InstructionData(Dataset):
    def __init__(self, size, length, vocab_size):
        g = torch.Generator().manual_seed(3)
        start = torch.randint(1, vocab_size, (size, 1), generator=g)
        step = torch.randint(1, 5, (size, 1), generator=g)
        self.ids = (start + step * torch.arange(length)) % vocab_size

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        ids = self.ids[index]
        labels = ids.clone()
        labels[:4] = -100  # the prompt
        return {"input_ids": ids, "labels": labels}


def prepare_model_for_freeze_tuning(model, args):
    trainable_layers = [f"layers.{args.num_model_layers - k - 1}." for k in range(args.num_layer_trainable)]
    for name, param in model.named_parameters():
        param.requires_grad = any(layer in name and args.name_module_trainable in name for layer in trainable_layers)
    model.enable_input_require_grads()
    return model


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--finetuning_type", default="freeze", choices=["full", "freeze"])
    parser.add_argument("--num_layer_trainable", type=int, default=3)
    parser.add_argument("--num_model_layers", type=int, default=28)
    parser.add_argument("--name_module_trainable", default="mlp")
    parser.add_argument("--learning_rate", type=float, default=5e-4)
    parser.add_argument("--max_grad_norm", type=float, default=1.0)
    parser.add_argument("--max_steps", type=int, default=20)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)

    model = GLMModel()
    if args.finetuning_type == "freeze":
        model = prepare_model_for_freeze_tuning(model, args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    scaler = torch.amp.GradScaler("cpu")
    loader = DataLoader(InstructionData(160, 24, 300), batch_size=8, shuffle=True)

    model.train()
    for step, batch in enumerate(loader):
        if step == args.max_steps:
            break
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(**batch)["loss"]
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        print({"step": step, "loss": round(loss.item(), 4)})


if __name__ == "__main__":
    main()
