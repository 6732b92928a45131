"""Naming what a step was given: parameters, buffers, inputs, targets."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ampguard import compat
from ampguard.capture.events.operands import held_by, leaves, refs_in
from ampguard.capture.record import Event, GlueOp, Held, Ref, RootCall
from ampguard.diagnose import words
from ampguard.diagnose.evidence import Evidence
from ampguard.diagnose.givens.model_calls import has_parameters, model_calls
from ampguard.diagnose.givens.named_arguments import named_leaves
from ampguard.diagnose.givens.places import place_of
from ampguard.diagnose.locate.rows import is_masks_doing
from ampguard.diagnose.locate.slicing import only_forbids
from ampguard.diagnose.protocol.owners import variable_name
from ampguard.numerics import cleaned, is_finite

_IN_CODE = re.compile(r"(?!args\b)[A-Za-z_]\w*(\.\w+|\[\w+\]|\['[^'\]]+'\])*")


CONSTANT = "tensor"
"""The role of what a module read beside its arguments and its state."""


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """A tensor of the step's givens. `held` is the script's own object, `tensor` its value at the time.

    `made_by` is set where the script made it in the same step, from a constant. `is_batch`: its first dimension is the
    batch's; a tensor that the step only took its batch from holds all samples.
    """

    name: str
    role: str
    held: Tensor
    tensor: Tensor
    samples: list[int]
    made_by: Ref | None = None
    is_batch: bool = True

    @property
    def key(self) -> int | Ref:
        """Under which a replay puts another value in its place."""
        return self.made_by if self.made_by is not None else id(self.held)

    @property
    def short_name(self) -> str:
        """The name where it can stand in code (`labels`, `batch['x']`, `data.pos`); "x" for what only describes it."""
        return self.name if _IN_CODE.fullmatch(self.name) else "x"


def describe_state(evidence: Evidence) -> NamedTensor | None:
    """The parameter or buffer at which the chain ends, where it does."""
    if evidence.given is None:
        return None
    element = evidence.given_tensor
    base = compat.base_of(element) if element is not None else None
    if isinstance(base, nn.Parameter):  # what a product of a Linear reads without gradients: its weight, transposed
        element = base
    if element is not None and element.is_leaf and (element.requires_grad or isinstance(element, nn.Parameter)):
        named = _state_by_identity(evidence, element)
        if named is None and sent_by(evidence, element) is not None:
            return None  # what a stage of a pipeline was sent, and whose gradient it sends back
        if evidence.phase == "backward" and evidence.intended and only_forbids(element):
            return None
        name = _name_in_call(evidence, element) or variable_name(element) or f"a parameter read in: {_code(evidence)}"
        return named or NamedTensor(name, "parameter", element, element, [])
    for root in evidence.events():
        if not isinstance(root, RootCall):
            continue
        found = _state_of(root, evidence, element)
        if found is not None:
            if evidence.intended and not _is_poisoned(found):
                return None
            return found
    return None


def buffer_behind(evidence: Evidence) -> NamedTensor | None:
    """The buffer at which the chain ends, where it does, whether its values are meant or not."""
    if evidence.given is None:
        return None
    roots = [event for event in evidence.events() if isinstance(event, RootCall)]
    found = (_state_of(root, evidence, evidence.given_tensor) for root in roots)
    return next((state for state in found if state is not None and state.role == "buffer"), None)


def all_buffers(evidence: Evidence) -> list[NamedTensor]:
    """Every floating buffer of the modules that the step called, as it is now."""
    names = evidence.replayer.names if evidence.replayer is not None else {}
    modules = {id(m): m for e in evidence.events() if isinstance(e, RootCall) for m in compat.all_modules(e.module)}
    return [
        NamedTensor(f"{path}.{name}" if (path := names.get(id(module), "")) else name, "buffer", tensor, tensor, [])
        for module in modules.values()
        for name, tensor in compat.buffers_of(module).items()
        if tensor is not None and tensor.is_floating_point()
    ]


def _code(evidence: Evidence) -> str:
    return words.code_at(evidence.op.line) or "the step"


def _state_by_identity(evidence: Evidence, element: Tensor) -> NamedTensor | None:
    if evidence.replayer is not None:
        name = evidence.replayer.parameter_names.get(id(element))
        return NamedTensor(name, "parameter", element, element, []) if name is not None else None
    for root in evidence.events():
        for module in compat.all_modules(root.module) if isinstance(root, RootCall) else ():
            for name, parameter in compat.parameters_of(module).items():
                if parameter is element:
                    return NamedTensor(name, "parameter", element, element, [])
    return None


def _name_in_call(evidence: Evidence, element: Tensor) -> str | None:
    """Under which name the script gave it to a module for one call (`functional_call`)."""
    for root in evidence.events():
        for name, given in root.swapped_state.items() if isinstance(root, RootCall) else ():
            if isinstance(given, Held) and given.tensor is element:
                return str(name)
    return None


def repaired_state(evidence: Evidence) -> dict[int | Ref, Tensor]:
    """Every parameter and buffer of the step that is not finite, by identity, with what a reset gives in the bad places: 1
    in a running variance, else 0."""
    repaired: dict[int | Ref, Tensor] = {}
    element = evidence.given_tensor
    if element is not None and element.is_leaf and element.requires_grad:
        repaired[id(element)] = cleaned(element)
    bad = nonfinite_state(evidence)
    roots = [event.module for event in evidence.events() if isinstance(event, RootCall)]
    variances = {id(getattr(module, "running_var", None)) for root in roots for module in compat.all_modules(root)}
    for key, value in bad.items():
        clean = cleaned(value)
        repaired[key] = clean.where(value.isfinite(), 1.0) if key in variances else clean
    return repaired


def nonfinite_state(evidence: Evidence) -> dict[int, Tensor]:
    """Every parameter and buffer of the step's modules that is not finite, as it was before the step, by identity."""
    found: dict[int, Tensor] = {}
    for root in evidence.events():
        if isinstance(root, RootCall):
            saved = {id(s.owner.get(s.name)): s.copy for s in root.buffers if s.copy is not None}
            for tensor in compat.all_tensors(root.module):
                if compat.is_made(tensor):
                    continue  # a weight that the step has computed: it was not there before
                value = saved.get(id(tensor), tensor).detach()
                if value.is_floating_point() and not is_finite(value):
                    found[id(tensor)] = value
    return found


def _state_of(root: RootCall, evidence: Evidence, element: Tensor | None) -> NamedTensor | None:
    """By identity first; a replay may have used a stand-in, so then by shape and values."""
    names = evidence.replayer.names if evidence.replayer is not None else {}
    candidates: list[NamedTensor] = []
    saved = {id(s.owner.get(s.name)): s for s in root.buffers}
    for module in compat.all_modules(root.module):
        path = names.get(id(module), "")
        for place, role in ((compat.parameters_of(module), "parameter"), (compat.buffers_of(module), "buffer")):
            for name, tensor in place.items():
                if tensor is None or not tensor.is_floating_point() or compat.is_made(tensor):
                    continue
                before = saved.get(id(tensor))
                value = before.copy if before is not None and before.copy is not None else tensor
                full = f"{path}.{name}" if path else name
                named = NamedTensor(full, role, tensor, value, [])
                if element is tensor:
                    return named
                if element is not None and shares_memory(element, tensor):
                    return named
                if _looks_like(element, value) and not bool(torch.isfinite(value).all()):
                    candidates.append(named)
    return candidates[0] if candidates else None


def _looks_like(element: Tensor | None, value: Tensor) -> bool:
    if element is None or element.numel() != value.numel() or element.device != value.device:
        return False
    one, other = (
        torch.nan_to_num(compat.elements_here(t.detach()).double(), 7.0).reshape(-1) for t in (element, value)
    )
    return torch.equal(one, other)


def shares_memory(one: Tensor, other: Tensor) -> bool:
    try:
        return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() != 0
    except RuntimeError:
        return False


def sent_by(evidence: Evidence, tensor: Tensor) -> str | None:
    """The collective by which another rank sent it to the script; None where it is this rank's own."""
    brought = evidence.replayer.brought() if evidence.replayer is not None else []
    return next((name for sent, name in brought if sent is tensor or shares_memory(sent, tensor)), None)


def _is_poisoned(state: NamedTensor) -> bool:
    """Whether an infinite buffer was not meant to be: a mask or a sentinel holds 0, 1 and infinities, nothing else."""
    values = state.tensor.detach().reshape(-1).double()
    if isinstance(state.held, nn.Parameter) or bool(torch.isnan(values).any()):
        return True
    return bool(set(values[torch.isfinite(values)].unique().tolist()) - {0.0, 1.0})


def describe_input(evidence: Evidence) -> NamedTensor | None:
    """The input or target at which the chain ends, where it does and its values were not meant to be infinite."""
    if evidence.given is None or describe_state(evidence) is not None:
        return None
    element = evidence.given_tensor
    if element is not None and element.grad_fn is not None:
        element = _leaf_behind_clone(element)  # else a computed value, which is no data
    if element is None:
        return None
    if evidence.intended and not evidence.chain.is_data and not _carries_data(evidence):
        return None
    alike = [
        (event, name, held)
        for event, name, held in evidence.held()
        if held.tensor is element or _looks_like(element, held.value) or shares_memory(element, held.tensor)
    ]
    if alike:
        return _named(evidence, *min(alike, key=lambda item: is_finite(item[2].value)))
    value = evidence.given_values if evidence.given_values is not None else element.detach()
    for event in evidence.events():
        for name, leaf in named_leaves(event) if isinstance(event, RootCall) else ():
            made = evidence.made(leaf) if isinstance(leaf, Ref) else None
            if made is not None and _looks_like(element, made):
                as_made = value.reshape(made.shape)  # the operator may have read it through a view
                return NamedTensor(name, "input", made, as_made, bad_samples(as_made), leaf)
    if evidence.given.reader.in_backward:  # nothing that the step was given: it was made where nobody can follow
        return None
    made_here = _made_for_the_loss(evidence, value)
    if made_here is not None:
        return made_here
    name = _attribute_name(evidence, element) or variable_name(element) or "a tensor"
    is_batch = compat.is_dense(value) and _is_per_sample(evidence, value)
    return NamedTensor(name, CONSTANT, element, value, bad_samples(value), is_batch=is_batch)


def _leaf_behind_clone(element: Tensor) -> Tensor | None:
    """The tensor that a module was given a clone of in a replay: a batch whose own gradient is asked for (a penalty)."""
    node = element.grad_fn
    if node is None or node.name() != "CloneBackward0":
        return None
    leaf = getattr(node.next_functions[0][0], "variable", None)
    return leaf if isinstance(leaf, Tensor) else None


def _made_for_the_loss(evidence: Evidence, value: Tensor) -> NamedTensor | None:
    """What an operator outside modules read that the script made in the same step: a target, where it has a row for each
    sample."""
    assert evidence.given is not None
    reader = next((e for e in evidence.events() if e.index == evidence.given.reader.event), None)
    if not isinstance(reader, GlueOp) or not compat.is_dense(value):
        return None
    operands = [leaf for _, leaf in named_leaves(reader) if isinstance(leaf, (Held, Ref))]
    leaf = operands[evidence.given.operand] if evidence.given.operand < len(operands) else None
    made = evidence.made(leaf) if isinstance(leaf, Ref) else None
    if made is None or not isinstance(leaf, Ref):
        return None
    is_batch = _is_per_sample(evidence, value)
    role = ("input" if _goes_into_model(evidence) else "target") if is_batch else CONSTANT
    name = _written(made) or words.code_at(reader.line) or role
    return NamedTensor(name, role, made, value, bad_samples(value), leaf, is_batch)


def _attribute_name(evidence: Evidence, element: Tensor) -> str | None:
    """The attribute of a module that is this tensor and no buffer, as the module's own code calls it."""
    for root in evidence.events():
        for module in compat.all_modules(root.module) if isinstance(root, RootCall) else ():
            name = next((name for name, value in vars(module).items() if value is element), None)
            if name is not None:
                return f"self.{name}"
    return None


def _named(evidence: Evidence, event: Event, name: str, held: Held) -> NamedTensor:
    """What an event was given, by its name in the batch, of the argument, or the line that used it."""
    in_batch = evidence.replayer.name_in_batch(held.tensor) if evidence.replayer is not None else None
    if in_batch is None and not isinstance(event, RootCall):
        name = _written(held.tensor) or words.code_at(event.line) or name
    name = in_batch or name
    value = held.value.detach()
    is_models = event.index in _models(evidence)
    may_be_batch = bool(in_batch) or is_models
    role = "input" if is_models or _goes_into_model(evidence) else "target"
    if role == "target" and in_batch is None and _is_table(evidence, event, held):
        role = "table"
    return NamedTensor(
        name, role, held.tensor, value, bad_samples(value), is_batch=may_be_batch and compat.is_dense(value)
    )


def _written(tensor: Tensor) -> str | None:
    """How the script writes a tensor that it holds, also where it lies deep in a batch of its own."""
    name = variable_name(tensor)
    place = place_of(tensor) if name is None else None
    return place.written if place is not None else name


def _is_table(evidence: Evidence, event: Event, held: Held) -> bool:
    """Whether it holds something else than samples: no row for each, and read besides a DataLoader's batch, or rows twice."""
    if _is_per_sample(evidence, held.value):
        return False
    if evidence.replayer is not None and evidence.replayer.has_batch:
        return True
    operands = leaves((event.args, event.kwargs))
    values = [leaf.value if isinstance(leaf, Held) else evidence.made(leaf) for leaf in operands if not _is_plain(leaf)]
    indices = [t for t in values if t is not None and t.dtype == torch.int64]
    return any(t.unique().numel() < t.numel() for t in indices)


def _is_plain(leaf: object) -> bool:
    return not isinstance(leaf, (Held, Ref))


def _is_per_sample(evidence: Evidence, value: Tensor) -> bool:
    """Whether a tensor has a row for each sample of the batch; so where the batch is not known."""
    models = [event for event in evidence.events() if has_parameters(event)]
    inputs = [held.value for event in models for held in held_by(event)]
    made = [evidence.made(ref) for event in models for ref in refs_in((event.args, event.kwargs))]
    sizes = {t.shape[0] for t in (*inputs, *made) if t is not None and t.dim()}
    return not sizes or (value.dim() > 0 and value.shape[0] in sizes)


def _goes_into_model(evidence: Evidence) -> bool:
    """Whether the bad value reached the result through a module with parameters."""
    models = _models(evidence)
    return any(link.op.event in models for link in evidence.chain.links)


def _models(evidence: Evidence) -> set[int]:
    return {event.index for event in model_calls(evidence.events())}


def _carries_data(evidence: Evidence) -> bool:
    """Whether infinities in a given tensor are a hole in the data, and no mask or sentinel.

    Where they empty rows of a softmax they are a mask, and where only a factor of 0 made them NaN they were meant. Else they
    are data if the other values are ordinary numbers, or if a model's input or the batch held them and nothing made them
    NaN: then nothing was to consume them.
    """
    element, values = evidence.given_tensor, evidence.given_values
    if element is None or values is None or is_masks_doing(evidence) or evidence.is_finite_beside_zero:
        return False
    values = compat.elements_here(values)
    finite = values[torch.isfinite(values)]
    if values.numel() > 1 and (finite.unique().numel() > 2 or not torch.equal(finite, finite.trunc())):
        return True
    is_untouched = not evidence.converts or (not finite.numel() and not bool((values < 0).any()))
    return is_untouched and _is_of_the_batch(evidence, element)


def _is_of_the_batch(evidence: Evidence, element: Tensor) -> bool:
    """Whether a tensor, or what was made of it before, went into a module with parameters, or came from the DataLoader."""
    if evidence.replayer is not None and evidence.replayer.name_in_batch(element) is not None:
        return True
    models = _models(evidence)
    if any(held.tensor is element and event.index in models for event, _, held in evidence.held()):
        return True
    return evidence.given is not None and evidence.given.reader.event not in models and _goes_into_model(evidence)


def bad_samples(tensor: Tensor) -> list[int]:
    """Positions along the first dimension that hold a non-finite value; none are known of a sparse tensor."""
    if tensor.dim() == 0 or not compat.is_dense(tensor):
        return []
    rows = torch.isfinite(tensor).reshape(tensor.shape[0], -1).all(1)
    return [int(i) for i in (~rows).nonzero().reshape(-1)[:32]]
