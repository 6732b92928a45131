import torch
import torch.nn as nn
import torch.nn.functional as F


class GraphAttentionLayer(nn.Module):
    def __init__(self, in_features, out_features, alpha, concat=True):
        super().__init__()
        self.concat = concat
        self.alpha = alpha
        self.W = nn.Parameter(torch.empty(in_features, out_features))
        nn.init.xavier_uniform_(self.W, gain=1.414)
        self.a = nn.Parameter(torch.empty(2 * out_features, 1))
        nn.init.xavier_uniform_(self.a, gain=1.414)

    def forward(self, h, adj):
        Wh = torch.mm(h, self.W)
        half = Wh.shape[1]
        e = torch.matmul(Wh, self.a[:half]) + torch.matmul(Wh, self.a[half:]).T
        e = F.leaky_relu(e, self.alpha)

        zero_vec = -9e15 * torch.ones_like(e)
        attention = torch.where(adj > 0, e, zero_vec)
        attention = F.softmax(attention, dim=1)
        h_prime = torch.matmul(attention, Wh)
        return F.elu(h_prime) if self.concat else h_prime
