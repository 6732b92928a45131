import torch


class FlatGroup:
    """Parameters of one group, laid out one after another in a buffer that the optimizer updates at once."""

    def __init__(self, parameters):
        self.parameters = [p for p in parameters if p.requires_grad]
        self.buffer = torch.empty(sum(p.numel() for p in self.parameters))
        self.grad_buffer = torch.zeros_like(self.buffer)
        with torch.no_grad():
            for p, data, grad in zip(self.parameters, self._pieces(self.buffer), self._pieces(self.grad_buffer)):
                data.copy_(p)
                p.data, p.grad = data, grad
        self.buffer.grad = self.grad_buffer

    def _pieces(self, flat):
        sizes = [p.numel() for p in self.parameters]
        return [piece.view(p.shape) for piece, p in zip(flat.split(sizes), self.parameters)]

    def is_valid(self):
        return all(
            p.data_ptr() == data.data_ptr() and p.grad is not None and p.grad.data_ptr() == grad.data_ptr()
            for p, data, grad in zip(self.parameters, self._pieces(self.buffer), self._pieces(self.grad_buffer))
        )
