import torch


class ContiguousParams:
    """Keeps all parameters of the given groups in one buffer (and their gradients in another), for fast updates."""

    def __init__(self, groups):
        self._groups = [dict(g) for g in groups]
        self._flat = []
        for group in self._groups:
            params = list(group["params"])
            size = sum(p.numel() for p in params)
            data, grad = torch.zeros(size), torch.zeros(size)
            offset = 0
            for p in params:
                end = offset + p.numel()
                data[offset:end] = p.detach().reshape(-1)
                p.data = data[offset:end].view_as(p)
                p.grad = grad[offset:end].view_as(p)
                offset = end
            data.grad = grad
            group["members"], group["params"] = params, [data]
            self._flat.append((data, grad, params))

    def contiguous(self):
        return [{k: v for k, v in g.items() if k != "members"} for g in self._groups]

    def assert_buffer_is_valid(self):
        for data, grad, params in self._flat:
            offset = 0
            for p in params:
                assert p.data_ptr() == data.data_ptr() + 4 * offset, "a parameter left its buffer"
                assert p.grad.data_ptr() == grad.data_ptr() + 4 * offset, "a gradient left its buffer"
                offset += p.numel()
