"""What all tests need of the process that they run in."""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Iterator

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sampled", action="store_true", help="no slow tests, and one or two parameter sets of each")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`--sampled`: each function once; where it has four parameter sets or more, with the first and the last of them."""
    if not config.getoption("--sampled"):
        return
    by_function: dict[str, list[pytest.Item]] = {}
    for item in items:
        by_function.setdefault(item.nodeid.partition("[")[0], []).append(item)
    chosen = {
        id(item)
        for each in by_function.values()
        for item in (each[0], *each[-1:] * (len(each) >= 4))
        if item.get_closest_marker("slow") is None
    }
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in chosen])
    items[:] = [item for item in items if id(item) in chosen]


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Started in the background by a shell: children would inherit a Ctrl-C that does nothing.
    signal.signal(signal.SIGINT, signal.default_int_handler)
for ignored in (signal.SIGHUP, signal.SIGQUIT):  # by nohup, and by a shell
    if signal.getsignal(ignored) is signal.SIG_IGN:
        signal.signal(ignored, signal.SIG_DFL)


@pytest.fixture(autouse=True, scope="module")
def imports_are_no_garbage() -> None:
    """Hundreds of thousands of objects that stay for ever: without them `gc.collect` takes no second, but a moment."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def nothing_stays_compiled() -> Iterator[None]:
    """Where anything was ever compiled the guard keeps operators, not calls: what a test compiles is forgotten after it."""
    yield
    compat = sys.modules.get("ampguard.compat")
    if compat is not None and compat.may_compile():
        sys.modules["torch"]._dynamo.reset()
    if "torch._dynamo.utils" in sys.modules:
        sys.modules["torch._dynamo.utils"].counters.clear()  # whether anything was compiled before the guard
