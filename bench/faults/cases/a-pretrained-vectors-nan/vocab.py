import os

import torch


class Vocab:
    def __init__(self, path):
        self.index, rows = {}, []
        with open(path) as f:
            for line in f:
                word, *values = line.split()
                self.index[word] = len(rows)
                rows.append([float(v) for v in values])
        self.vectors = torch.tensor(rows)
        self.unk = self.index["<unk>"]

    def encode(self, text, length=8):
        ids = [self.index.get(w, self.unk) for w in text.split()][:length]
        return ids + [self.index["the"]] * (length - len(ids))


def load():
    return Vocab(os.path.join(os.path.dirname(os.path.abspath(__file__)), "vectors.txt"))
