"""Which term of a loss has the bad gradients, where the loss is a sum (`a + 0.1 * b`, a dict of losses)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ampguard.capture.events.operands import refs_in
from ampguard.capture.glue.functions import Applied
from ampguard.capture.record import BackwardCall, Event, GlueOp, Held, Ref, RootCall
from ampguard.diagnose import words
from ampguard.diagnose.budget import Budget
from ampguard.diagnose.gradients import GradientEvidence
from ampguard.replay.variants import Variant

SUMS = frozenset(["add", "sub", "sum", "stack", "cat", "mean", "neg"])
FORMS = frozenset(
    ["view", "reshape", "squeeze", "unsqueeze", "_to_copy", "clone", "alias", "expand", "select", "unbind"]
)
PRODUCTS = frozenset(["mul", "div"])
MAX_TERMS = 12


@dataclass(frozen=True, slots=True)
class Term:
    """One summand of the loss, by the line or the name that it has in the code."""

    name: str
    is_bad: bool


def terms_of(evidence: GradientEvidence, budget: Budget) -> list[Term]:
    """The terms of the loss that was differentiated, and which have bad gradients; empty where it is no sum.

    One replay for each term; empty, too, where the budget does not last for all of them.
    """
    replayer = evidence.replayer
    calls = [e for e in evidence.events() if isinstance(e, BackwardCall) and not e.is_functional]
    if replayer is None or not calls:
        return []
    (loss, *others) = calls[-1].args[0]
    if others or not isinstance(loss, Ref):
        return []
    events = {event.index: event for event in evidence.events()}
    found = summands(loss, events)
    if not 2 <= len(found) <= MAX_TERMS:
        return []
    terms = []
    for ref in found:
        if budget.is_spent:
            return []
        try:
            outcome = replayer.run(Variant(differentiate=ref), traced=False)
        except Exception:  # a term that needs no gradient
            continue
        terms.append(Term(_name(events[ref.event], ref, outcome.output_names), outcome.is_bad))
    return terms


def in_words(terms: list[Term]) -> str:
    """ "Of the 3 terms of the loss, `loss_box` has them"; "" where it says nothing."""
    bad = [term for term in terms if term.is_bad]
    good = {term.name for term in terms if not term.is_bad}
    if not bad or not good or any(term.name in good for term in bad):
        return ""  # all of them, or terms that stand on one line
    names = ", ".join(f"`{term.name}`" for term in bad[:4])
    return f" Of the {len(terms)} terms of the loss, {names} {'has' if len(bad) == 1 else 'have'} the bad gradients."


def summands(loss: Ref, events: dict[int, Event]) -> list[Ref]:
    """What a loss is the sum of, looking through sums, factors and changes of form."""
    found: list[Ref] = []
    stack = [loss]
    while stack and len(found) <= MAX_TERMS:
        ref = stack.pop()
        event = events.get(ref.event)
        parts = _parts(event) if isinstance(event, GlueOp) else []
        if parts:
            stack += reversed(parts)
        elif ref not in found:
            found.append(ref)
    return found


def _parts(op: GlueOp) -> list[Ref]:
    name = str(op.func).split(".")[1].rstrip("_")
    refs = refs_in(op.args)
    if name in FORMS and len(refs) == 1:
        return refs
    if name in PRODUCTS and len(refs) == 1 and not isinstance(op.args[1], Ref) and _is_number(op.args[1]):
        return refs
    is_reduction = name in ("sum", "mean")
    if name in SUMS and refs and all(isinstance(a, (Ref, Held, int, float, list, tuple)) for a in op.args[:2]):
        return [] if is_reduction and not _is_of_stack(op) else refs
    return []


def _is_of_stack(op: GlueOp) -> bool:
    """`torch.stack(losses).sum()`: few numbers; the mean over a batch is no sum of terms."""
    return len(op.outputs) == 1 and len(refs_in(op.args)) > 1


def _is_number(value: object) -> bool:
    if isinstance(value, Held):
        return isinstance(value.tensor, Tensor) and value.tensor.numel() == 1
    return isinstance(value, (int, float))


def _name(event: Event, ref: Ref, output_names: dict[Ref, str]) -> str:
    if isinstance(event, RootCall):
        named = output_names.get(ref)
        if not named and isinstance(event.module, Applied):
            return f"{event.module.function.__name__}.apply(...)"
        alone = words.code_at(event.line) if not named and len(event.outputs) == 1 else None
        return named or alone or f"output {ref.output}"
    return words.code_at(event.line) or f"term {ref.event}"
