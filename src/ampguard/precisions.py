"""What precisions are called elsewhere: by PyTorch, Lightning, Accelerate, apex and Swin."""

from __future__ import annotations

ALIASES = {
    "o0": "fp32", "32": "fp32", "32-true": "fp32", "float32": "fp32", "no": "fp32", "none": "fp32",
    "o1": "fp16", "16": "fp16", "16-mixed": "fp16", "float16": "fp16", "half": "fp16",
    "o2": "O2", "o3": "O3", "16-true": "O3", "fp16-true": "O3",
    "bfloat16": "bf16", "bf16-mixed": "bf16", "bfloat16-true": "bf16-true", "fp8": "float8",
}  # fmt: skip
"""By their names in lower case."""


def usual_name(name: str) -> str:
    """What ampguard calls it; an unknown name as it is.

    >>> usual_name("16-mixed"), usual_name("BF16"), usual_name("fp17")
    ('fp16', 'bf16', 'fp17')
    """
    lower = name.strip().lower()
    return ALIASES.get(lower, lower if lower.startswith(("fp", "bf", "tf", "float")) else name.strip())
