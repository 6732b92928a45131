"""What all tests need of the process that they run in."""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Iterator

import pytest

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
