import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class SelfAttention(nn.Module):
    def __init__(self, hidden_size, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.query_key_value = nn.Linear(hidden_size, 3 * hidden_size)
        self.dense = nn.Linear(hidden_size, hidden_size)

    def forward(self, hidden_states, mask):
        b, t, h = hidden_states.shape
        q, k, v = self.query_key_value(hidden_states).view(b, t, self.num_heads, -1).chunk(3, dim=-1)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        probs = scores.float().masked_fill(mask, -1e4).softmax(dim=-1).to(v.dtype)
        return self.dense((probs @ v).transpose(1, 2).reshape(b, t, h))


class GLMBlock(nn.Module):
    def __init__(self, hidden_size, num_heads):
        super().__init__()
        self.input_layernorm = nn.LayerNorm(hidden_size)
        self.attention = SelfAttention(hidden_size, num_heads)
        self.post_attention_layernorm = nn.LayerNorm(hidden_size)
        self.mlp = nn.Sequential(
            nn.Linear(hidden_size, 4 * hidden_size), nn.GELU(), nn.Linear(4 * hidden_size, hidden_size)
        )

    def forward(self, x, mask):
        x = x + self.attention(self.input_layernorm(x), mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class GLMModel(nn.Module):
    def __init__(self, vocab_size=300, hidden_size=48, num_layers=4, num_heads=4):
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab_size, hidden_size)
        self.layers = nn.ModuleList(GLMBlock(hidden_size, num_heads) for _ in range(num_layers))
        self.final_layernorm = nn.LayerNorm(hidden_size)
        self.lm_head = nn.Linear(hidden_size, vocab_size, bias=False)

    def enable_input_require_grads(self):
        """Keeps the graph alive through checkpointed blocks when the embeddings are frozen."""
        self.word_embeddings.register_forward_hook(lambda module, inputs, output: output.requires_grad_(True))

    def forward(self, input_ids, labels=None):
        t = input_ids.shape[1]
        mask = torch.ones(t, t, dtype=torch.bool, device=input_ids.device).triu(1)
        x = self.word_embeddings(input_ids)
        for layer in self.layers:
            x = layer(x, mask)
        logits = self.lm_head(self.final_layernorm(x))
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        return {"loss": loss, "logits": logits}
