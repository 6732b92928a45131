"""What all tests need of the process that they run in."""

from __future__ import annotations

import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Started in the background by a shell: children would inherit a Ctrl-C that does nothing.
    signal.signal(signal.SIGINT, signal.default_int_handler)
