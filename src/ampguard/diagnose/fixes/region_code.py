"""The code by which modules leave autocast: their call as the script writes it, else a few lines beside the model.

A call is changed where the script makes it itself, in one place, and calls nothing else there. What PyTorch or another
library calls (a part of `nn.Sequential`, a block of a `timm` model), and one of several that a loop calls, is changed by
itself: its `forward` is wrapped.
"""

from __future__ import annotations

import ast
import re

from torch import nn

from ampguard import compat
from ampguard.capture.protocol.script_lines import is_script_code
from ampguard.capture.record import Line, RootCall
from ampguard.diagnose import words
from ampguard.diagnose.code.rewrite import PRIMARY
from ampguard.diagnose.code.source import LineOfCode, Source, line_of_code
from ampguard.diagnose.code.text import Edit, joined_lines, spliced
from ampguard.diagnose.evidence import Evidence
from ampguard.replay.module_calls import ModuleCall
from ampguard.replay.variables import attribute_path, expression_of

_INDEX = re.compile(r"\[['\"]?(\w+)['\"]?\]")
ONE_CALL = "leave autocast for this one call: "

Found = tuple[LineOfCode, ast.Call, ast.stmt | None]
"""A call in the text: its line, its node, and its statement (None in the head of a compound statement)."""


def call_outside_autocast(evidence: Evidence, module: nn.Module, name: str, device: str) -> str | None:
    """The statement that calls the module, with that call outside autocast; None where this cannot be written there."""
    calls = evidence.trace.calls.get(id(module), [])
    if len(calls) != 1:
        return None
    call, name = calls[0], name or expression_of(module) or ""
    found = _call_of(call.line, name, call) if call.line is not None and is_script_code(call.line.code) else None
    if call.line is None or found is None or _is_shared(evidence, module, call.line, found):
        return None
    line, node, statement = found
    widened = _widened(line.source, node, call)
    if widened is None or statement is None:
        return None
    off = f'torch.autocast("{device}", enabled=False)'
    place = f"  # {words.line_name(call.line)}" if call.line != evidence.op.line else ""
    if _is_all_of(statement, node):
        text = joined_lines(spliced(line.source.text, *line.source.span(statement), widened))
        return f"with {off}: {text}{place}"
    start, end = line.source.span(node.func)
    edits = [(start, start, f"{off}("), (end, end, ")"), *widened]
    is_short = statement.lineno == statement.end_lineno
    shown: ast.stmt | ast.expr = statement if is_short else node
    text = joined_lines(spliced(line.source.text, *line.source.span(shown), edits))
    return f"{ONE_CALL}{text}{place}"


def forward_outside_autocast(evidence: Evidence, modules: list[tuple[nn.Module, str]], device: str) -> str | None:
    """Lines that take modules out of autocast, whoever calls them; None where what they are given lies in containers."""
    calls = [call for module, _ in modules for call in evidence.trace.calls.get(id(module), [])]
    if not calls or any(call.nests and call.has_low for call in calls):
        return None
    known = [expression_of(module) for module, _ in modules]
    if any(e is None and not name for e, (_, name) in zip(known, modules, strict=True)):
        return None
    written = [
        e if e is not None else attribute_path("self", name) for e, (_, name) in zip(known, modules, strict=True)
    ]
    where = "after the model is built"
    own = _own_class(evidence)
    if any(e is None or e.startswith("self.") for e in known) and own is not None:
        where = f"at the end of {own}.__init__"
    lines = [f'part.forward = torch.autocast("{device}", enabled=False)(part.forward)', *_widening_hook(calls)]
    names = ", ".join(name or "the model" for _, name in modules)
    if all(name.replace(".", "").isdigit() for _, name in modules):  # places in a list
        names = f"module{'s' if len(modules) > 1 else ''} {names}"
    first = f"compute {names} in float32, once, {where}:"
    if len(written) == 1:
        return "\n".join([first, f"part = {written[0]}", *lines])
    return "\n".join([first, f"for part in ({', '.join(written)}):", *(f"    {line}" for line in lines)])


def _widening_hook(calls: list[ModuleCall]) -> list[str]:
    """The hook that gives a module what it is given in float32; none where that has no low precision."""
    if not any(call.has_low for call in calls):
        return []
    one = "x.float() if torch.is_tensor(x) and x.is_floating_point() else x"
    given = f"tuple({one if any(call.others for call in calls) else 'x.float()'} for x in given)"
    if not any(call.low_named for call in calls):
        return [f"part.register_forward_pre_hook(lambda _, given: {given})"]
    named = f"{{k: {one} for k, x in named.items()}}"
    return [f"part.register_forward_pre_hook(lambda _, given, named: ({given}, {named}), with_kwargs=True)"]


def _own_class(evidence: Evidence) -> str | None:
    """The class of the step's model where the script defines it."""
    roots = {id(e.module): e.module for e in evidence.events() if isinstance(e, RootCall)}
    kinds = {type(root) for root in roots.values() if compat.has_parameters(root)}
    kind = kinds.pop() if len(kinds) == 1 else None
    code = getattr(getattr(kind, "forward", None), "__code__", None)
    return kind.__name__ if kind is not None and code is not None and is_script_code(code) else None


def _call_of(line: Line, name: str, call: ModuleCall) -> Found | None:
    """The call of a module in a line of the script: by its name, or as the only one that can be this call."""
    code = line_of_code(line)
    if code is None:
        return None
    found = [
        (code, node, statement)
        for part, statement in code.parts
        for node in ast.walk(part)
        if isinstance(node, ast.Call) and node.lineno <= line.number <= (node.end_lineno or node.lineno)
    ]
    named = [f for f in found if _is_named(f[1].func, name)]
    chosen = named if named else [f for f in found if _may_be_a_module(f[1].func) and _is_given_as_many(f[1], call)]
    return chosen[0] if len(chosen) == 1 else None


def _is_named(function: ast.expr, name: str) -> bool:
    """`self.blocks[0].attn`, `block["attn"]`, `attn` for "blocks.0.attn"."""
    parts = name.split(".")
    written = _INDEX.sub(r".\1", ast.unparse(function)).split(".")
    needed = 2 if parts[-1].isdigit() else 1
    return bool(name) and written[-needed:] == parts[-needed:]


def _may_be_a_module(function: ast.expr) -> bool:
    """Whether what is called can be a module by its text: a variable, an attribute, an item, and no function of PyTorch."""
    if isinstance(function, ast.Subscript):
        return True
    if isinstance(function, ast.Name):
        return function.id not in ("float", "int", "len", "sum", "print", "dict", "list", "tuple", "zip", "max", "min")
    base: ast.expr = function
    while isinstance(base, ast.Attribute):
        base = base.value
    return isinstance(function, ast.Attribute) and isinstance(base, ast.Name) and base.id not in ("torch", "F", "nn")


def _is_given_as_many(node: ast.Call, call: ModuleCall) -> bool:
    is_open = any(isinstance(a, ast.Starred) for a in node.args) or any(k.arg is None for k in node.keywords)
    return is_open or (len(node.args) == len(call.low) and {k.arg for k in node.keywords} == set(call.named))


def _is_shared(evidence: Evidence, module: nn.Module, line: Line, found: Found) -> bool:
    """Whether the same call in the text is one of other modules as well: a loop over layers, or a class that is used twice."""
    names = dict(evidence.replayer.names) if evidence.replayer is not None else {}
    for root in (event.module for event in evidence.events() if isinstance(event, RootCall)):
        names[id(root)] = names.get(id(root)) or expression_of(root) or ""
    for other, calls in evidence.trace.calls.items():
        same = next((call for call in calls if call.line == line), None)
        if other == id(module) or same is None:
            continue
        theirs = _call_of(line, names.get(other, ""), same)
        if theirs is None or theirs[1] is found[1]:
            return True
    return False


def _widened(source: Source, node: ast.Call, call: ModuleCall) -> list[Edit] | None:
    """The edits that make a call's arguments float32; None where the text does not tell which they are."""
    if call.nests and call.has_low:
        return None
    if any(isinstance(a, ast.Starred) for a in node.args) or any(k.arg is None for k in node.keywords):
        return None if call.has_low else []
    named = {k.arg: k.value for k in node.keywords}
    low = [a for a, is_low in zip(node.args, call.low, strict=False) if is_low]
    if len(call.low) != len(node.args) or any(name not in named for name in call.low_named):
        return None
    edits: list[Edit] = []
    for operand in (*low, *(named[name] for name in call.low_named)):
        start, end = source.span(operand)
        is_loose = not isinstance(operand, PRIMARY)
        edits += [(start, start, "(" * is_loose), (end, end, f"{')' * is_loose}.float()")]
    return edits


def _is_all_of(statement: ast.stmt, node: ast.Call) -> bool:
    """Whether a statement does nothing but make the call: then it may stand under a `with` as it is."""
    value = getattr(statement, "value", None)
    inner = [n for part in (*node.args, *(k.value for k in node.keywords)) for n in ast.walk(part)]
    is_plain = not any(isinstance(n, (ast.Call, ast.BinOp)) for n in inner)
    return isinstance(statement, (ast.Assign, ast.AnnAssign, ast.Return, ast.Expr)) and value is node and is_plain
