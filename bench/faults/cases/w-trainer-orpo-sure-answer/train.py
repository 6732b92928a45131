"""Odds-ratio preference optimisation (ORPO) of a tiny language model with the Hugging Face Trainer, float32."""

import torch
from torch.nn import functional as F
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

VOCAB, PROMPT = 24, 5


class Preferences(Dataset):
    """Questions with a yes or no for an answer: yes where the question's last word is an even one, else no."""

    def __init__(self, n=256):
        g = torch.Generator().manual_seed(9)
        question = torch.randint(4, VOCAB, (n, PROMPT), generator=g)
        no = question[:, -1:] % 2
        self.chosen = torch.cat([question, 2 + no], dim=1)
        self.rejected = torch.cat([question, 3 - no], dim=1)

    def __len__(self):
        return len(self.chosen)

    def __getitem__(self, i):
        return {"chosen": self.chosen[i], "rejected": self.rejected[i]}


class ORPOTrainer(Trainer):
    beta = 0.1

    def answer_logps(self, model, ids):
        logits = model(input_ids=ids).logits[:, PROMPT - 1 : -1]
        logps = F.log_softmax(logits, dim=-1).gather(2, ids[:, PROMPT:, None]).squeeze(2)
        return logps.mean(1)

    def odds_ratio_loss(self, chosen, rejected):
        log_odds = (chosen - rejected) - (torch.log1p(-torch.exp(chosen)) - torch.log1p(-torch.exp(rejected)))
        return -F.logsigmoid(log_odds)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        chosen = self.answer_logps(model, inputs["chosen"])
        rejected = self.answer_logps(model, inputs["rejected"])
        loss = -chosen.mean() + self.beta * self.odds_ratio_loss(chosen, rejected).mean()
        return (loss, {"chosen": chosen}) if return_outputs else loss


def main():
    torch.set_num_threads(1)
    set_seed(5)
    config = GPT2Config(
        vocab_size=VOCAB,
        n_positions=PROMPT + 1,
        n_embd=32,
        n_layer=1,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    args = TrainingArguments(
        output_dir="out",
        num_train_epochs=5,
        per_device_train_batch_size=8,
        learning_rate=6e-2,
        lr_scheduler_type="constant",
        use_cpu=True,
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    ORPOTrainer(model=GPT2LMHeadModel(config), args=args, train_dataset=Preferences()).train()


if __name__ == "__main__":
    main()
