"""fp16-overflow and overflow, of the norm by which gradients are clipped: all of them are finite, and it is not.

What happens   `clip_grad_norm_` of float16 gradients: the square root of the sum of their squares is beyond 65504.
Why it hurts   it multiplies them by limit / norm, which is 0. The optimizer's step learns nothing from them, and no error
               comes: the loss stands still. Without a limit (inf, to ask for the norm only) it makes them NaN.
Instead        gradients in float32 (float32 weights under autocast, or float32 copies that the optimizer steps with).
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite, isinf

import torch

from ampguard.capture.cut_to_zero import CutToZero
from ampguard.diagnose.protocol.scene import Scene, at
from ampguard.diagnose.protocol.telling import Telling, breach
from ampguard.diagnose.words import number
from ampguard.incident import Fix
from ampguard.numerics import dtype_name

MOST_KEPT = 0.5
"""Share of a gradient's elements that clipping has to leave for a precision to be a cure."""


@breach("fp16-overflow")
@breach("overflow")
def norm_overflow(scene: Scene) -> Telling:
    cut: CutToZero = scene.facts["cut"]
    limit, dtype = torch.finfo(cut.dtype).max, dtype_name(cut.dtype)
    in_float32, exact = cut.norms
    text = (
        f"The norm of the gradients of `{scene.optimizer}` overflows where they are clipped, at {at(cut.line)}, though each "
        f"of them is finite: the largest is {number(cut.largest)}, and their norm {number(exact)}; "
    )
    text += "their squares leave" if exact < limit else "that leaves"
    is_measured = isinf(cut.limit)  # there is no limit
    factor = "inf / inf = NaN" if is_measured else f"{number(cut.limit)} / inf = 0"
    end = "makes the weights NaN" if is_measured else "learns nothing from them, and no error comes of it"
    text += f" {dtype}, which ends at {number(limit)}. Clipping multiplies them by {factor}: the step {end}."
    evidence = {"norm_in_float64": exact, "max_abs": cut.largest, "limit": limit}
    evidence |= {"makes_nan": True} if is_measured else {"max_norm": cut.limit}
    if isfinite(in_float32):
        evidence |= {"norm_in_float32": in_float32, "kept_in_float32": cut.kept}
    return Telling(
        text,
        cut.line,
        tuple(_fixes(cut)),
        evidence=evidence,
        dtype=dtype,
        phase="optimizer",
        op="aten.linalg_vector_norm.default",
    )


def _fixes(cut: CutToZero) -> Iterator[Fix]:
    in_float32, exact = cut.norms
    if isfinite(in_float32):
        outcome = f"in float32 their norm is {number(in_float32)}, and clipped there {cut.kept:.0%} of their elements are not 0"
        is_cure = cut.kept > MOST_KEPT
        yield Fix(
            "fp32-parameters",
            None,
            "keep the parameters in float32 (no .half()) and run the model under torch.autocast: gradients, and their norm, "
            "are float32 then",
            is_cure,
            outcome,
        )
        yield Fix(
            "master-weights",
            None,
            "or copy the gradients to float32 copies of the parameters, clip those, and let the optimizer step with them",
            is_cure,
            outcome,
        )
        yield Fix("lower-loss-scale", None, "or multiply the loss by less, where it is multiplied")
        return
    how = "torch.nn.utils.clip_grad_value_(parameters, 1.0) in its place, or before it"
    yield Fix("clip-gradients", None, f"{how}: a limit for each element needs no sum of squares")
    yield Fix("lower-loss-scale", None, f"the loss is so large that its gradients' norm is {number(exact)}: divide it")
