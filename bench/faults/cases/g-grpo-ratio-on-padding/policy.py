import torch
import torch.nn as nn
import torch.nn.functional as F


class TinyPolicy(nn.Module):
    def __init__(self, vocab=24, dim=32):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.lm_head = nn.Linear(dim, vocab)
        nn.init.constant_(self.lm_head.bias, 0.0)
        self.lm_head.bias.data[1] = -4.0  # the base model hardly ever stops by itself

    def forward(self, input_ids):
        h, _ = self.rnn(self.embed_tokens(input_ids))
        return self.lm_head(h)


def per_token_logps(model, input_ids, completion_len):
    logits = model(input_ids)[:, -completion_len - 1 : -1]
    logps = F.log_softmax(logits.float(), dim=-1)
    return logps.gather(-1, input_ids[:, -completion_len:, None]).squeeze(-1)


@torch.no_grad()
def generate(model, prompts, length, eos, pad, g):
    ids, done = prompts, torch.zeros(len(prompts), dtype=torch.bool)
    for _ in range(length):
        probs = model(ids)[:, -1].softmax(-1)
        probs[:, pad] = 0
        token = torch.multinomial(probs, 1, generator=g).squeeze(1)
        token = torch.where(done, pad, token)
        done = done | (token == eos)
        ids = torch.cat([ids, token[:, None]], 1)
    completion = ids[:, prompts.shape[1] :]
    return ids, (completion != pad).float()
