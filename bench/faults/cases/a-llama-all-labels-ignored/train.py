"""Supervised fine-tuning of a (very) small Llama: the prompt is not trained on, long rows are cut at max_length."""

import random

import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.set_num_threads(1)
IGNORE_INDEX = -100
MAX_LENGTH = 24


def build_example(rng, prompt_len):
    prompt = [rng.randrange(4, 64) for _ in range(prompt_len)]
    answer = [t ^ 1 for t in prompt[:4]] + [2]
    ids = (prompt + answer)[:MAX_LENGTH]
    labels = ([IGNORE_INDEX] * prompt_len + answer)[:MAX_LENGTH]
    return ids, labels


def collate(rows):
    width = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([r[0] + [0] * (width - len(r[0])) for r in rows])
    labels = torch.tensor([r[1] + [IGNORE_INDEX] * (width - len(r[1])) for r in rows])
    mask = torch.tensor([[1] * len(r[0]) + [0] * (width - len(r[0])) for r in rows])
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def main():
    torch.manual_seed(0)
    rng = random.Random(4)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    lengths = [[rng.randrange(6, 18) for _ in range(2)] for _ in range(14)]
    lengths[10] = [27, 31]  # two long documents in one batch
    for step, pair in enumerate(lengths):
        batch = collate([build_example(rng, n) for n in pair])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = model(**batch)
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print({"step": step, "loss": round(output.loss.item(), 4)})


if __name__ == "__main__":
    main()
