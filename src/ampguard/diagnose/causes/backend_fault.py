"""backend-fault: finite in another backend, bad in this one.

What happens   the step is bad as compiled code (or another kernel) computes it, and finite when PyTorch runs the same
               operators one by one: a compiler's or a kernel's error, or arithmetic that it reorders beyond its range.
Why it hurts   no line of the script is at fault, and none explains it: looked at eagerly, the step is fine.
Instead        keep the module that is named out of the compiled code, or choose another backend; report the operators
               and the numbers to who makes the backend.
Not this       a step that is bad eagerly too: that is explained as any other, compiled or not.
"""

from __future__ import annotations

from torch import nn

from ampguard import compat
from ampguard.capture.record import RootCall
from ampguard.diagnose import words
from ampguard.diagnose.compiled.fault import CompiledFault
from ampguard.diagnose.compiled.kernels import other_kernel
from ampguard.diagnose.compiled.search import Search
from ampguard.diagnose.evidence import Evidence
from ampguard.diagnose.finding import Finding, Proposal, cause
from ampguard.replay.compiled import InParts, Part
from ampguard.replay.variants import Variant

LEAST = {"inductor": "aot_eager", "aot_eager": "eager"}
"""For a backend, one that does the same with less: inductor without its own kernels, aot_eager without its rewriting."""


@cause("backend-fault", phases=("compiled", "forward", "backward"))
def backend_fault(evidence: Evidence) -> Finding | None:
    return of_compiled(evidence) if isinstance(evidence, CompiledFault) else of_kernel(evidence)


def of_kernel(evidence: Evidence) -> Finding | None:
    """An operator whose result another of PyTorch's kernels makes finite, from the same operands and in the same type."""
    found = other_kernel(evidence)
    if found is None:
        return None
    kernel, result = found
    bad = evidence.op.outputs[evidence.link.result].bad
    count, peak = bad.count if bad is not None else 1, float(result.abs().max())
    code = words.code(evidence) or "..."
    return Finding(
        "backend-fault",
        f"{words.operator(evidence)} {words.place(evidence)} gives {evidence.kind} where {kernel.name} is finite: of "
        f"{result.numel()} results {count} are not finite, and by {kernel.name} the largest is {words.number(peak)}, from the "
        f"same operands in the same type. No line of the script is at fault.",
        weight=100,
        evidence={
            "backend": evidence.op.name,
            "other_backend": kernel.name,
            "results": result.numel(),
            "nonfinite": count,
            "max_abs_other": peak,
        },
        proposals=(
            Proposal(
                "change-backend",
                words.region(evidence),
                kernel.how.format(code=code),
                trial=lambda _: Variant(within=kernel.chosen),
            ),
        ),
    )


def of_compiled(evidence: CompiledFault) -> Finding:
    """Compiled code whose graphs are finite when they run eagerly."""
    return Finding(
        "backend-fault",
        told(evidence),
        weight=100,
        phase="backward" if evidence.bad.kind == "gradient" else None,
        proposals=tuple(proposals(evidence)),
    )


def told(evidence: CompiledFault) -> str:
    """What the compiled code gives, and what the same operators give eagerly."""
    region, backend = evidence.region, evidence.backend
    loss = evidence.outcome.loss
    eagerly = f" Run eagerly the step is finite; its loss is {words.number(loss)}." if loss is not None else ""
    if region is None:
        return (
            f"the step is not finite as {backend} compiled it and finite run eagerly: no part of it could be told from the "
            f"others.{eagerly} No line of the script is at fault."
        )
    what = words.operator(evidence) if evidence.is_of_backward or len(region.operators) < 2 else "a group of operators"
    where = f"in {evidence.module}" if evidence.module else words.place(evidence)
    if evidence.is_of_backward:
        bad, count, _ = evidence.gradients()
        numbers = f"{bad} of {count} gradients are not finite compiled, and all are eagerly"
    else:
        numbers = (
            f"of {region.results} results {region.nonfinite} are not finite compiled and {region.nonfinite_eager} are not "
            f"eagerly, on the same inputs (largest |x| {words.number(region.largest_eager)})"
        )
        if not region.nonfinite and not region.nonfinite_eager:
            numbers = (
                f"its {region.results} results are finite and not those of the same inputs eagerly (largest |x| "
                f"{words.number(region.largest_eager)})"
            )
    apart = (
        f"; {'the others' if region.nonfinite or region.nonfinite_eager else 'they'} differ by at most "
        f"{words.number(region.largest_difference)}"
        if region.largest_difference
        else ""
    )
    group = f" The group is {', '.join(region.operators)}." if len(region.operators) > 1 else ""
    rest = "" if region.is_smallest else f" {unfinished(evidence)}"
    return (
        f"{what} {where} is wrong as {backend} compiled it: {numbers}{apart}.{eagerly}{group}{rest} No line of the script "
        f"is at fault."
    )


def unfinished(evidence: CompiledFault) -> str:
    """What was tried before time was up, and what was not."""
    search = evidence.search
    count = search.bench.compilations
    return (
        f"Time was up after {count} compilation{'s' if count != 1 else ''} in {search.seconds:.1f} seconds: shorter stretches "
        f"of it were not tried."
    )


def proposals(evidence: CompiledFault) -> list[Proposal]:
    """Leave the module out of the compiled code; another backend; no compiled code at all."""
    region, module = evidence.region, evidence.module
    found = []
    if region is not None and region.module is not None and module:
        found.append(
            Proposal(
                "change-backend",
                module,
                f"leave {module} out of the compiled code, before the first step:\n"
                f'    part = model.get_submodule("{module}")\n'
                f"    part.forward = torch.compiler.disable(part.forward)",
                trial=without_module,
            )
        )
        alike = modules_alike(evidence)
        if len(alike) > 1:
            kind = type(alike[0]).__name__
            found.append(
                Proposal(
                    "change-backend",
                    module,
                    f"leave every {kind} out of the compiled code, before the first step:\n"
                    f"    for part in model.modules():\n"
                    f"        if type(part).__name__ == {kind!r}:\n"
                    f"            part.forward = torch.compiler.disable(part.forward)",
                    trial=without_modules_alike,
                )
            )
    least = LEAST.get(evidence.backend)
    if region is not None and least is not None:
        found.append(Proposal("change-backend", module, f'torch.compile(..., backend="{least}")', trial=with_least))
    found.append(Proposal("change-backend", module, "leave out torch.compile: run it eagerly", known=evidence.outcome))
    return found


def modules_alike(evidence: CompiledFault) -> list[nn.Module]:
    """The modules of the step of the same class as the region's."""
    region, replayer = evidence.region, evidence.replayer
    roots = [event.module for event in evidence.events() if isinstance(event, RootCall)]
    known = {id(module): module for root in roots for module in compat.all_modules(root)}
    if region is None or replayer is None or region.module not in known:
        return []
    kind = type(known[region.module])
    return [module for identity, module in known.items() if type(module) is kind and identity in replayer.names]


def without_module(evidence: Evidence) -> Variant:
    """Every graph compiled, but for what runs in the region's module."""
    assert isinstance(evidence, CompiledFault)
    region = evidence.region
    return compiled_without(evidence.search, {region.module} if region is not None else set())


def without_modules_alike(evidence: Evidence) -> Variant:
    """Every graph compiled, but for what runs in modules of the class of the region's."""
    assert isinstance(evidence, CompiledFault)
    return compiled_without(evidence.search, {id(module) for module in modules_alike(evidence)})


def compiled_without(search: Search, modules: set[int | None]) -> Variant:
    """Every graph compiled, but for what runs in these modules."""
    parts = []
    for call, graph in enumerate(search.bench.calls):
        start = 0
        for i in range(len(graph.nodes) + 1):
            if i == len(graph.nodes) or not modules.isdisjoint(graph.modules_of(graph.nodes[i])):
                parts += [Part(call, start, i)] if start < i else []
                start = i + 1
    return Variant(compiled=InParts(tuple(parts), retains_graph=search.bench.retains_graph))


def with_least(evidence: Evidence) -> Variant:
    """Every graph compiled by the backend that does less."""
    assert isinstance(evidence, CompiledFault)
    search = evidence.search
    other = compat.backend_called(LEAST[evidence.backend])
    return Variant(compiled=InParts(tuple(search.wholes()), other, search.bench.retains_graph))
