"""Whether a name that a tool prints means an ATen operator.

ampguard names the overload (`aten.bmm.default`). Others name the autograd node (`BmmBackward0`) or the Python function
(`Tensor.__matmul__`, `Functional.linear`), which may stand for several operators: any of them earns the credit.
"""

from __future__ import annotations

import re

PYTHON_NAMES: dict[str, frozenset[str]] = {
    name: frozenset(ops.split())
    for name, ops in {
        "matmul": "bmm mm mv dot addmm",
        "rmatmul": "bmm mm mv dot",
        "linear": "addmm mm bmm linear",
        "bilinear": "bmm _trilinear",
        "einsum": "bmm mm mul sum",
        "baddbmm": "baddbmm",
        "truediv": "div",
        "rtruediv": "div mul reciprocal",
        "itruediv": "div",
        "true_divide": "div",
        "radd": "add",
        "iadd": "add",
        "rsub": "sub rsub",
        "isub": "sub",
        "rmul": "mul",
        "imul": "mul",
        "rpow": "pow",
        "ipow": "pow",
        "square": "pow",
        "softmax": "_softmax",
        "log_softmax": "_log_softmax",
        "cross_entropy": "nll_loss_forward nll_loss2d_forward _log_softmax",
        "nll_loss": "nll_loss_forward nll_loss2d_forward",
        "nll_loss2d": "nll_loss2d_forward",
        "layer_norm": "native_layer_norm",
        "group_norm": "native_group_norm",
        "batch_norm": "native_batch_norm _native_batch_norm_legit",
        "conv1d": "convolution",
        "conv2d": "convolution",
        "conv3d": "convolution",
        "conv_transpose1d": "convolution",
        "conv_transpose2d": "convolution",
        "norm": "linalg_vector_norm norm",
        "normalize": "div linalg_vector_norm",
        "scaled_dot_product_attention": "_scaled_dot_product_flash_attention_for_cpu bmm",
        "binary_cross_entropy_with_logits": "binary_cross_entropy_with_logits",
        "ctc_loss": "_ctc_loss",
        "where": "where scalar_tensor",
        "float": "_to_copy",
        "half": "_to_copy",
        "to": "_to_copy",
        "type": "_to_copy",
        "to_copy": "_to_copy",
        "embedding": "embedding",
    }.items()
}

CLASSES: dict[str, str] = {
    "Linear": "linear",
    "Softmax": "softmax",
    "LogSoftmax": "log_softmax",
    "CrossEntropyLoss": "cross_entropy",
    "NLLLoss": "nll_loss",
    "LayerNorm": "layer_norm",
    "GroupNorm": "group_norm",
    "BatchNorm1d": "batch_norm",
    "BatchNorm2d": "batch_norm",
    "Conv1d": "conv1d",
    "Conv2d": "conv2d",
    "CTCLoss": "ctc_loss",
    "Embedding": "embedding",
}
"""Modules of torch.nn that are one function: naming the module names the operator."""


def same_op(said: str, accepted: str) -> bool:
    """Whether `said` names the overload `accepted` (`aten.bmm.default`).

    A full overload must be that overload; a looser name must mean the operator, whichever overload.
    """
    if said.count(".") == 2 and said.split(".")[0] == accepted.split(".")[0]:
        return said == accepted
    operator = accepted.split(".")[1]
    return operator.strip("_") in {op.strip("_") for op in _meant_by(said)}


def _meant_by(said: str) -> frozenset[str]:
    name = said.split(".")[-1]
    name = CLASSES.get(name, name)
    if match := re.fullmatch(r"(\w+?)Backward\d*", name):
        name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", match[1]).lower()
    name = name.strip("_")
    return PYTHON_NAMES.get(name, frozenset((name,)))
