"""The host process: imports vLLM once and forks children, which run the scenarios.

Importing vLLM takes seconds, forking takes none: a child that died is replaced at once, and candidates of a connector
need no import each. Run as `python -m diff_tests.vllm_target.host --control FD`, the descriptor being one end of a
socket; the host ends when the other end closes.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable

from diff_tests.vllm_target import wire

_END_TIMEOUT_S = 10.0

Serve = Callable[[int, int, int, str, wire.Fork], None]


def main() -> None:
    """Imports vLLM, then serves the parent until it is gone."""
    # Ctrl-C is for the parent, which then closes our socket.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parser = argparse.ArgumentParser()
    parser.add_argument("--control", type=int, required=True)
    control = socket.socket(fileno=parser.parse_args().control)
    # A connector may lie where the user is; last, so that nothing there shadows vLLM.
    sys.path.append(os.getcwd())
    try:
        with _EndWithParent(control):
            version, serve = _prepare()
    except Exception as error:
        control.sendall(wire.frame(wire.NotReady(bad_input=False, message=f"{type(error).__name__}: {error}")))
        return
    control.sendall(wire.frame(wire.Ready(version)))
    _fork_on_request(control, version, serve)
    os._exit(0)  # nothing is left to tidy up, and vLLM's ways of doing so take their time


class _EndWithParent:
    """Ends the process if the parent goes away inside the block, where nobody reads the socket."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()  # no thread may live on when the process forks

    def _watch(self) -> None:
        poll = select.poll()
        poll.register(self._control, select.POLLHUP)
        while not self._done.wait(0.1):
            if poll.poll(0):
                os._exit(0)


def _prepare() -> tuple[str, Serve]:
    """Imports vLLM and builds what all scenarios share. Returns its version and what a child does."""
    import torch

    torch.set_num_threads(1)
    import vllm

    from diff_tests.vllm_target import child, configs
    from diff_tests.vllm_target.platforms import look_at_models_here

    logging.disable(logging.CRITICAL)
    look_at_models_here()
    configs.warm_up()
    # What lives now lives for good: no collection looks at it again, and children share its pages.
    gc.collect()
    gc.freeze()
    gc.disable()
    return vllm.__version__, child.serve


def _fork_on_request(control: socket.socket, version: str, serve: Serve) -> None:
    while True:
        header, fds, _, _ = socket.recv_fds(control, wire.HEADER_BYTES, 3)
        if not header:
            return
        message = wire.decode_to_host(control.recv(wire.body_length(header), socket.MSG_WAITALL))
        if isinstance(message, wire.AskEnd):
            control.sendall(wire.frame(wire.Ended(_end_of(message.pid))))
            continue
        pid = os.fork()
        if pid == 0:
            _live(control, fds, version, message, serve)
        for fd in fds:
            os.close(fd)
        control.sendall(wire.frame(wire.Forked(pid)))


def _live(
    control: socket.socket,
    fds: list[int],
    version: str,
    fork: wire.Fork,
    serve: Serve,
) -> None:
    """A child's whole life. Never returns: what follows in the code is the host's."""
    code = 1
    try:
        os.setpgid(0, 0)  # so that it can be killed with whatever it starts
        control.close()
        serve(fds[0], fds[1], fds[2], version, fork)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _end_of(pid: int) -> int | None:
    """A child stays a zombie until asked for, so its ID cannot have been given to another process."""
    deadline = time.monotonic() + _END_TIMEOUT_S
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)  # reaped here and nowhere else
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.001)
    return None


if __name__ == "__main__":
    main()
