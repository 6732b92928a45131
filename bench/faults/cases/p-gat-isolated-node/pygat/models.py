import torch
import torch.nn as nn
import torch.nn.functional as F

from .layers import GraphAttentionLayer


class GAT(nn.Module):
    def __init__(self, nfeat, nhid, nclass, alpha=0.2, nheads=2):
        super().__init__()
        self.attentions = [GraphAttentionLayer(nfeat, nhid, alpha) for _ in range(nheads)]
        for i, attention in enumerate(self.attentions):
            self.add_module("attention_{}".format(i), attention)
        self.out_att = GraphAttentionLayer(nhid * nheads, nclass, alpha, concat=False)

    def forward(self, x, adj):
        x = torch.cat([att(x, adj) for att in self.attentions], dim=1)
        x = F.elu(self.out_att(x, adj))
        return F.log_softmax(x.float(), dim=1)
