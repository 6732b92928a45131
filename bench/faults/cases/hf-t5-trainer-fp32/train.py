"""A small T5 with the Hugging Face Seq2SeqTrainer in float32, evaluated every few steps. Its position buckets take log(0)."""

import torch
from torch.utils.data import Dataset
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration, set_seed


class Reversal(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(3, 50, (n, 14), generator=g)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        ids = self.ids[i]
        labels = ids.flip(0)[:6].clone()
        if i % 3 == 0:
            labels[4:] = -100
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def main():
    torch.set_num_threads(1)
    set_seed(1)
    config = T5Config(vocab_size=50, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0)
    args = Seq2SeqTrainingArguments(
        output_dir="out",
        max_steps=24,
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        use_cpu=True,
        logging_steps=6,
        eval_strategy="steps",
        eval_steps=12,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Seq2SeqTrainer(
        model=T5ForConditionalGeneration(config),
        args=args,
        train_dataset=Reversal(200, 2),
        eval_dataset=Reversal(24, 3),
    )
    trainer.train()
    print("final eval loss", trainer.evaluate()["eval_loss"])


if __name__ == "__main__":
    main()
