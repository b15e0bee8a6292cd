"""The parent's side of the processes: hosts, which import vLLM, and the children that they fork.

Hosts are shared by all targets of this process that want the same vLLM, and end with it.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from diff_tests.vllm_target import wire
from diff_tests.vllm_target.bookmark import Bookmark, shared_page
from diff_tests.vllm_target.releases import (
    Source,
    TargetInputError,
    TargetStartError,
    cache_root,
    installed_version,
)
from oracle import contracts
from sim.history import Failure, History

# Importing vLLM takes seconds, its first look at a model architecture up to half a minute.
_START_TIMEOUT_S = 300.0
_FORK_TIMEOUT_S = 60.0
_PIPE_BYTES = 1 << 20
_READ_BYTES = 1 << 16  # a larger buffer is mapped anew for every read, which costs more than the read
# A host keeps vLLM in memory. One that nobody uses is kept for the next target, but not many of them.
_MAX_IDLE_HOSTS = 2


class Died(Exception):
    """The child is gone, or does not answer. `history` is what it had sent so far and the failure that ends it."""

    def __init__(self, partial: History, failure: Failure, hangs: bool) -> None:
        self.history: History = [*partial, failure]
        self.failure = failure
        self.hangs = hangs


class _Silence(Exception):
    """Nothing came in time."""


class _Closed(Exception):
    """The other end is gone."""


# ----------------------------------------------------------------------------------------------------------------- hosts


class _Host:
    """A process with vLLM imported, which forks children."""

    def __init__(self, source: Source) -> None:
        """Returns when vLLM is imported. Raises TargetStartError."""
        self.num_children = 0
        self._lock = threading.Lock()  # one question at a time: the jobs of a campaign ask from threads of their own
        self._control, theirs = socket.socketpair()
        # What vLLM prints, in host and children; only its last lines matter, and only if something dies.
        self._output = tempfile.TemporaryFile("a+b")  # noqa: SIM115 - lives as long as the host
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "diff_tests.vllm_target.host", "--control", str(theirs.fileno())],
                env=environment(source),
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C in a terminal reaches us, not the host and its children
            )
        try:
            self.version = self._wait_until_ready()
        except BaseException:
            self.close()
            raise

    def _wait_until_ready(self) -> str:
        try:
            message = self._receive(_START_TIMEOUT_S)
        except _Silence:
            raise TargetStartError(f"vLLM could not be started: no answer in {_START_TIMEOUT_S:g} seconds") from None
        except _Closed:
            raise TargetStartError(f"vLLM could not be started: {self.last_lines(5)}") from None
        if isinstance(message, wire.NotReady):
            raise TargetStartError(f"vLLM could not be started: {message.message}")
        assert isinstance(message, wire.Ready)
        return message.version

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def fork(self, connector: str | None, device: str, fds: Sequence[int]) -> int:
        """A new child with these ends of its pipes and the page of its bookmark. Returns its process ID."""
        question = wire.frame(wire.Fork(connector, contracts.added(), device))
        try:
            with self._lock:
                socket.send_fds(self._control, [question], fds)
                message = self._receive(_FORK_TIMEOUT_S)
        except (OSError, _Silence, _Closed):
            raise TargetStartError(f"vLLM's host process is gone: {self.last_lines(5)}") from None
        assert isinstance(message, wire.Forked)
        return message.pid

    def end_of(self, pid: int) -> str:
        """How a child ended, in words."""
        try:
            with self._lock:
                self._control.sendall(wire.frame(wire.AskEnd(pid)))
                message = self._receive(_FORK_TIMEOUT_S)
        except (OSError, _Silence, _Closed):
            return "its host process is gone"
        assert isinstance(message, wire.Ended)
        if message.code is None:
            return "closed its pipe and lives on"
        if message.code < 0:
            return f"killed by signal {-message.code}"
        return f"exit code {message.code}: {self.last_lines(1)}"

    def _receive(self, timeout_s: float) -> wire.FromHost:
        deadline = time.monotonic() + timeout_s
        header = self._exactly(wire.HEADER_BYTES, deadline)
        return wire.decode_from_host(self._exactly(wire.body_length(header), deadline))

    def _exactly(self, num_bytes: int, deadline: float) -> bytes:
        parts = bytearray()
        while len(parts) < num_bytes:
            _wait_for(self._control.fileno(), deadline)
            part = self._control.recv(num_bytes - len(parts))
            if not part:
                raise _Closed
            parts += part
        return bytes(parts)

    def last_lines(self, count: int) -> str:
        """The end of what vLLM printed."""
        fd = self._output.fileno()
        tail = os.pread(fd, 4096, max(os.fstat(fd).st_size - 4096, 0))
        lines = [line for line in tail.decode(errors="replace").splitlines() if line.strip()]
        return "\n".join(lines[-count:])

    def close(self) -> None:
        """Ends the host; its children end when their own pipes close."""
        self._control.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._output.close()


_hosts: dict[tuple[str, ...], _Host] = {}
_hosts_lock = threading.Lock()  # held over who is there and how many children each has


def _host_for(source: Source) -> _Host:
    """The running host of a vLLM, or a new one."""
    key = (str(source.folder), str(source.platform), os.getcwd(), os.environ.get("PYTHONPATH", ""))
    host = _hosts.pop(key, None)
    if host is not None and not host.is_alive:
        host.close()
        host = None
    host = host or _Host(source)
    _hosts[key] = host  # last: the dictionary is in order of use
    idle = [key for key, other in _hosts.items() if other is not host and other.num_children == 0]
    for old in idle[:-_MAX_IDLE_HOSTS]:
        _hosts.pop(old).close()
    return host


@atexit.register
def _close_hosts() -> None:
    while _hosts:
        _, host = _hosts.popitem()
        host.close()


def environment(source: Source) -> dict[str, str]:
    """The host's environment: the chosen vLLM first, ourselves next; quiet, offline, deterministic, one thread."""
    here = Path(__file__).resolve().parents[2]
    paths = [str(source.folder)] if source.folder else []
    paths += [str(here), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONHASHSEED": "0",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        # KV events name blocks by whole keys, so that they can be told which prefix they are of.
        "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0",
        # What vLLM remembers of model architectures. Releases that shared a folder would evict each other's entries.
        "VLLM_CACHE_ROOT": str(cache_root() / "state" / _state_name(source)),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        **({"VLLM_TARGET_DEVICE": source.platform} if source.platform else {}),
    }


def _state_name(source: Source) -> str:
    if source.kind == "path":
        return hashlib.sha256(str(source.folder).encode()).hexdigest()[:16]
    return source.name if source.folder else f"current-{installed_version()}"


# -------------------------------------------------------------------------------------------------------------- children


class Child:
    """A process that runs scenarios, and the pipes to it."""

    def __init__(self, source: Source, connector: str | None, device: str = "cpu") -> None:
        """Returns when the connector is in place. Raises TargetInputError or TargetStartError."""
        with _hosts_lock:
            self._host = _host_for(source)
            self._host.num_children += 1
        try:
            with _pipe() as (requests_read, self._requests), _pipe() as (self._answers, answers_write):
                page = shared_page()
                try:
                    self._bookmark = Bookmark(page)
                    self.pid = self._host.fork(connector, device, (requests_read, answers_write, page))
                finally:
                    os.close(page)
                os.close(requests_read)
                os.close(answers_write)
        except BaseException:
            self._leave_host()
            raise
        self._buffer = bytearray()
        self._end: str | None = None
        ready = self._wait_until_ready()
        self.version, self.replaces = ready.version, ready.replaces

    def _wait_until_ready(self) -> wire.Ready:
        try:
            message = self._next_message(time.monotonic() + _START_TIMEOUT_S)
        except (_Silence, _Closed) as end:
            why = "no answer" if isinstance(end, _Silence) else self._how_it_ended()
            self.kill()
            raise TargetStartError(f"vLLM could not be started: {why}") from None
        if isinstance(message, wire.NotReady):
            self.kill()
            raise TargetInputError(message.message)
        assert isinstance(message, wire.Ready)
        return message

    def send(self, message: wire.ToChild) -> None:
        """Hands a message over. A child that is gone shows when its answer is read."""
        data = memoryview(wire.frame(message))
        with contextlib.suppress(BrokenPipeError):
            while data:
                data = data[os.write(self._requests, data) :]

    def history(self, case: int, timeout_s: float) -> History:
        """The whole history of a case. Raises Died with what there is of it."""
        history: History = []
        deadline = time.monotonic() + timeout_s
        try:
            while True:
                message = self._next_message(deadline)
                if not isinstance(message, wire.Records) or message.case != case:
                    deadline = time.monotonic() + timeout_s  # an earlier case, whose caller lost interest
                    continue
                history += message.records
                if message.last:
                    return history
        except (_Silence, _Closed) as end:
            raise self._died(history, end, timeout_s) from None

    def answer(self, case: int, timeout_s: float) -> wire.ToParent:
        """The answer to a question, or the next of several. Each case of a campaign has its own time. Raises Died."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                message = self._next_message(deadline)
                if getattr(message, "case", None) == case:
                    return message
            except (_Silence, _Closed) as end:
                before, deadline = deadline, self._bookmark.turned_at + timeout_s
                if isinstance(end, _Closed) or deadline <= before:
                    raise self._died([], end, timeout_s) from None

    def case_at_hand(self, question: int) -> int | None:
        """The index of the case that the child is at, or died over; None if it has not come to this question yet."""
        return self._bookmark.index(question)

    def _died(self, partial: History, end: Exception, timeout_s: float) -> Died:
        step = getattr(partial[-1], "step", 0) if partial else 0
        hangs = isinstance(end, _Silence)
        kind = "Hang" if hangs else "ChildDied"
        message = f"no end after {timeout_s:g} seconds" if hangs else self._how_it_ended()
        return Died(partial, Failure(step=step, type=kind, phase="child", message=message), hangs)

    def _next_message(self, deadline: float) -> wire.ToParent:
        """Takes a message that is there in whole."""
        num_bytes = wire.HEADER_BYTES + wire.body_length(self._peek(wire.HEADER_BYTES, deadline))
        frame = self._peek(num_bytes, deadline)
        del self._buffer[:num_bytes]
        return wire.decode_to_parent(frame[wire.HEADER_BYTES :])

    def _peek(self, num_bytes: int, deadline: float) -> bytes:
        buffer = self._buffer
        while len(buffer) < num_bytes:
            _wait_for(self._answers, deadline)
            part = os.read(self._answers, _READ_BYTES)
            if not part:
                raise _Closed
            buffer += part
        return bytes(buffer[:num_bytes])

    def _how_it_ended(self) -> str:
        """In words. Asked for once: from then on the process ID may be another's."""
        if self._end is None:
            self._end = self._host.end_of(self.pid)
        return self._end

    def close(self) -> None:
        """Ends the child: it does when its pipe closes."""
        os.close(self._requests)
        os.close(self._answers)
        self._leave_host()
        self._how_it_ended()

    def stop(self) -> None:
        """Ends the child at once, with whatever it has started; its pipes stay."""
        if self._end is None:
            for kill in (os.killpg, os.kill):  # it may not lead its group yet
                with contextlib.suppress(ProcessLookupError):
                    kill(self.pid, signal.SIGKILL)

    def _leave_host(self) -> None:
        with _hosts_lock:
            self._host.num_children -= 1

    def kill(self) -> None:
        """The same, and closes the pipes."""
        self.stop()
        self.close()


@contextlib.contextmanager
def _pipe() -> Iterator[tuple[int, int]]:
    """Both ends of a pipe, closed if the block raises. A large pipe saves switches between us."""
    read, write = os.pipe()
    with contextlib.suppress(OSError):
        fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    try:
        yield read, write
    except BaseException:
        os.close(read)
        os.close(write)
        raise


def _wait_for(fd: int, deadline: float) -> None:
    """Returns when there is something to read. Raises _Silence at the deadline."""
    ready, _, _ = select.select([fd], [], [], max(deadline - time.monotonic(), 0))
    if not ready:
        raise _Silence
