"""A Python that has imported what scripts import, and forks a child for each that it is asked for: see `warm.py`.

`python warm_server.py FD PATH MODULE...`: imports the modules, from PATH too, and then answers requests on the socket FD,
one message each.
A child ends as any process of Python's does: what was raised goes through `sys.excepthook`, then the interpreter ends.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import gc
import importlib
import json
import os
import random
import runpy
import selectors
import signal
import socket
import sys
import threading
import time
import types
from importlib.machinery import SourceFileLoader
from types import TracebackType
from typing import Any

LIBRARIES = sys.path[1:]
"""Without the folder of this file; there is no PYTHONPATH in this process."""


def next_request(asking: socket.socket) -> dict[str, Any]:
    """Fork a child for each request and tell how it ended; returns in the children only, with what they are to be."""
    selector = selectors.DefaultSelector()
    selector.register(asking, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is not asking:
                selector.unregister(key.fileobj)
                _tell_end(key.fd, *key.data)
                continue
            message, descriptors, _, _ = socket.recv_fds(asking, 1 << 20, 4)
            if not message:
                os._exit(0)  # who asked has ended
            *streams, told = descriptors
            request: dict[str, Any] = json.loads(message)
            child = os.fork()
            if child == 0:
                for stream, at in enumerate(streams):
                    os.dup2(at, stream)
                for open_one in (*descriptors, *(k.fd for k in selector.get_map().values())):
                    os.close(open_one)
                for other in selector.get_map().values():
                    if other.data is not None:
                        os.close(other.data[1])
                asking.detach()
                selector.close()
                return request
            for stream in streams:
                os.close(stream)
            os.write(told, f"{child}\n".encode())
            selector.register(os.pidfd_open(child), selectors.EVENT_READ, (child, told))


def _tell_end(ended: int, child: int, told: int) -> None:
    _, status = os.waitpid(child, 0)
    with contextlib.suppress(BrokenPipeError):
        os.write(told, f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os.close(told)
    os.close(ended)


def start_as(request: dict[str, Any]) -> None:
    """Become what a new process would find: its folder, environment, words, path, random numbers and `__main__`."""
    words, environ = request["words"], request["environ"]
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(environ)
    random.seed()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(None)
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()
    sys.orig_argv[:] = [sys.executable, *words]
    kind = words[0]
    sys.argv[:] = words[1:] if kind in ("-m", "-c") else words
    if kind == "-m":
        first = os.getcwd()
        sys.argv[0] = "-m"
    elif kind == "-c":
        first = ""
        sys.argv[0] = "-c"
    else:
        first = os.path.dirname(os.path.realpath(kind))
    sys.path[:] = [first, *filter(None, environ.get("PYTHONPATH", "").split(os.pathsep)), *LIBRARIES]
    importlib.invalidate_caches()
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __annotations__={})
    sys.modules["__main__"] = main


def end_without_destructors() -> None:
    """Let the process end where C's exit handlers begin: torch's take all of its operators apart, in 0.2 s."""
    libc = ctypes.CDLL(None)
    unbuffered = 2  # _IONBF: what C's stdout holds back would be lost
    libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), None, unbuffered, ctypes.c_size_t(0))
    libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)


def run(words: list[str]) -> None:
    main = sys.modules["__main__"].__dict__
    if words[0] == "-m":
        runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]
    elif words[0] == "-c":
        exec(compile(words[1], "<string>", "exec", dont_inherit=True), main)
    else:
        path = os.path.join(os.getcwd(), words[0])
        loader = SourceFileLoader("__main__", path)
        main.update(__loader__=loader, __file__=path, __cached__=None)
        exec(compile(loader.get_data(path), path, "exec", dont_inherit=True), main)


def end_with(error: BaseException) -> None:
    """Print what Python prints, without the frames of this file; the interpreter does the rest."""
    below = error.__traceback__
    while below is not None and below.tb_frame.f_code.co_filename == __file__:
        below = below.tb_next
    error.__traceback__ = below
    sys.excepthook(type(error), error, below)
    shown_by = sys.excepthook

    def silent_once(kind: type[BaseException], value: BaseException, entries: TracebackType | None) -> None:
        if value is not error:
            shown_by(kind, value, entries)

    sys.excepthook = silent_once


def import_for_ever(names: list[str], path: list[str]) -> None:
    """Import modules that the end of the interpreter does not take apart: a child would copy them all, page by page."""
    before = set(sys.modules)
    kept: dict[str, Any] = {}

    def hide() -> None:
        for name, module in kept.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]

    atexit.register(hide)  # the first to be registered is the last to be called
    sys.path[:] = path + LIBRARIES
    for name in names:
        importlib.import_module(name)
    kept.update((name, module) for name, module in sys.modules.items() if name not in before)
    for module in kept.values():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(module))


def has_threads() -> bool:
    return len(os.listdir("/proc/self/task")) > 1 or threading.active_count() > 1


if __name__ == "__main__":
    asking = socket.socket(fileno=int(sys.argv[1]))
    import_for_ever(sys.argv[3:], sys.argv[2].split(os.pathsep) if sys.argv[2] else [])
    deadline = time.monotonic() + 10.0
    while (threads := has_threads()) and time.monotonic() < deadline:
        time.sleep(0.05)  # one that has done its work is about to end
    if threads:
        sys.exit("importing has started a thread: what is forked from here would lack it")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.collect()
    gc.freeze()  # a child that looked through all this would copy it, page by page
    server_main = sys.modules["__main__"]  # kept: its functions are still executing
    asked = next_request(asking)
    start_as(asked)
    end_without_destructors()
    try:
        run(asked["words"])
    except SystemExit:
        raise
    except BaseException as error:
        end_with(error)
        raise
