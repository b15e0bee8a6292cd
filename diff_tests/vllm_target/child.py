"""The child process: imports vLLM once, then executes scenarios until its pipe closes.

Run as `python -m diff_tests.vllm_target.child --requests FD --answers FD ...`. Standard output and error belong to
vLLM, which prints; frames go through pipes of our own.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from diff_tests.vllm_target import wire
from diff_tests.vllm_target.releases import TargetInputError
from sim.history import Failure, Record
from sim.scenario import Scenario

# Records of a case that takes long go out this often, so that a hang leaves its history behind.
_PULSE_S = 0.5
# Schedulers are rings of references. Collecting after every case would cost more than the case.
_CASES_PER_COLLECTION = 64
_BLOCKS_PER_COLLECTION = 50_000


class Inbox:
    """Reads frames ahead, so that the parent never waits for us; ends the process when the parent is gone."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._messages: queue.SimpleQueue[wire.ToChild] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def get(self) -> wire.ToChild:
        return self._messages.get()

    def _read(self) -> None:
        while True:
            header = self._exactly(wire.HEADER_BYTES)
            self._messages.put(wire.decode_to_child(self._exactly(wire.body_length(header))))

    def _exactly(self, num_bytes: int) -> bytes:
        parts = bytearray()
        while len(parts) < num_bytes:
            part = os.read(self._fd, num_bytes - len(parts))
            if not part:
                # Nobody is left to answer, whatever the main thread is in the middle of.
                os._exit(0)
            parts += part
        return bytes(parts)


class Outbox:
    """Sends answers; collects the records of the case at hand."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = threading.Lock()
        self._case = -1
        self._pulsed_case = -1
        self._flush = False
        self._records: list[Record] = []
        threading.Thread(target=self._pulse, daemon=True).start()

    def send(self, message: wire.ToParent) -> None:
        with self._lock:
            self._send(message)

    def begin(self, case: int, flush: bool) -> None:
        self._case, self._flush, self._records = case, flush, []

    def add(self, record: Record) -> None:
        self._records.append(record)
        if self._flush:
            self._send_records(last=False)

    def end(self) -> None:
        self._send_records(last=True)

    def _send_records(self, last: bool) -> None:
        with self._lock:
            # The main thread may append while the pulse sends: take a prefix, leave the rest.
            records = self._records[:]
            del self._records[: len(records)]
            if records or last:
                self._send(wire.Records(self._case, records, last))
            if last:
                self._case = -1

    def _send(self, message: wire.ToParent) -> None:
        data = memoryview(wire.frame(message))
        while data:
            data = data[os.write(self._fd, data) :]

    def _pulse(self) -> None:
        ticker = threading.Event()
        while not ticker.wait(_PULSE_S):
            if self._case >= 0 and self._case == self._pulsed_case:
                self._send_records(last=False)
            self._pulsed_case = self._case


def main() -> None:
    """Serves requests until the parent closes its end."""
    # Ctrl-C is for the parent, which then closes our pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, required=True)
    parser.add_argument("--answers", type=int, required=True)
    parser.add_argument("--connector")
    arguments = parser.parse_args()
    inbox, outbox = Inbox(arguments.requests), Outbox(arguments.answers)
    # A connector may lie where the user is; last, so that nothing there shadows vLLM.
    sys.path.append(os.getcwd())
    try:
        version, serve = _prepare(arguments, outbox)
    except TargetInputError as error:
        outbox.send(wire.NotReady(bad_input=True, message=str(error)))
        return
    except Exception as error:
        outbox.send(wire.NotReady(bad_input=False, message=f"{type(error).__name__}: {error}"))
        return
    outbox.send(wire.Ready(version))
    while True:
        serve(inbox.get())


def _prepare(arguments: argparse.Namespace, outbox: Outbox) -> tuple[str, Callable[[wire.ToChild], None]]:
    """Imports vLLM, puts the connector in place and builds what all cases share. Returns its version and the server."""
    import torch

    torch.set_num_threads(1)
    import vllm

    from diff_tests.vllm_target import configs, connectors
    from diff_tests.vllm_target.server import Server

    logging.disable(logging.CRITICAL)
    connector = connectors.install(arguments.connector)
    configs.warm_up()
    server = Server(vllm.__version__, connector)
    gc.collect()
    gc.freeze()
    gc.disable()
    return vllm.__version__, _Loop(server.run, server.startup_pool, server.step_times, outbox)


class _Loop:
    """Answers one message, and collects garbage now and then."""

    def __init__(
        self,
        run: Callable[[Scenario, str, str | None, Callable[[Record], None]], None],
        startup_pool: Callable[[Scenario], int],
        step_times: Callable[[Scenario, int, int], list[float]],
        outbox: Outbox,
    ) -> None:
        self._run = run
        self._startup_pool = startup_pool
        self._step_times = step_times
        self._outbox = outbox
        self._num_cases = 0
        self._num_blocks = 0

    def __call__(self, message: wire.ToChild) -> None:
        if isinstance(message, wire.AskCpuTime):
            self._outbox.send(wire.CpuTime(message.case, time.process_time()))
            return
        scenario = wire.unpack_scenario(message.scenario)
        if isinstance(message, wire.RunCase):
            self._outbox.begin(message.case, message.flush)
            try:
                self._run(scenario, message.judged_by, message.defect, self._outbox.add)
            except Exception as error:  # a vLLM that cannot be read or driven; the next case may fare better
                self._outbox.add(_unreadable(error))
            self._outbox.end()
        elif isinstance(message, wire.AskStepTimes):
            seconds = self._step_times(scenario, message.num_warmup_steps, message.num_steps)
            self._outbox.send(wire.StepTimes(message.case, seconds))
        else:
            self._outbox.send(self._pool(message.case, scenario))
        self._collect(scenario.engine.blocks)

    def _pool(self, case: int, scenario: Scenario) -> wire.StartupPool:
        try:
            return wire.StartupPool(case, self._startup_pool(scenario))
        except Exception as error:
            return wire.StartupPool(case, 0, refusal=f"{type(error).__name__}: {error}")

    def _collect(self, num_blocks: int) -> None:
        self._num_cases += 1
        self._num_blocks += num_blocks
        if self._num_cases >= _CASES_PER_COLLECTION or self._num_blocks >= _BLOCKS_PER_COLLECTION:
            gc.collect()
            self._num_cases = self._num_blocks = 0


def _unreadable(error: Exception) -> Failure:
    """Not raised by vLLM while it ran, but by us while we drove it or looked inside."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    message = f"{error} ({Path(place.filename).name}, line {place.lineno})"
    return Failure(step=0, type=type(error).__name__, phase="child", message=message)


if __name__ == "__main__":
    main()
