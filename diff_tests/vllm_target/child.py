"""The child process: executes scenarios until its pipe closes. The host forks it, see there.

Standard output and error belong to vLLM, which prints; frames go through pipes of our own.
"""

from __future__ import annotations

import gc
import os
import queue
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

from diff_tests.shard import Shard, resident_bytes
from diff_tests.vllm_target import connectors, memory, wire
from diff_tests.vllm_target.bookmark import Bookmark
from diff_tests.vllm_target.releases import TargetInputError
from diff_tests.vllm_target.server import Server
from oracle import contracts
from sim.history import Failure, History, Record
from sim.releases import rules_of
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


def serve(requests_fd: int, answers_fd: int, bookmark_fd: int, version: str, fork: wire.Fork) -> None:
    """Puts connector, contracts and KV memory in place, then serves requests until the parent closes its end. vLLM is
    imported by now."""
    inbox, outbox = Inbox(requests_fd), Outbox(answers_fd)
    memory.place_on(fork.device)
    connector = fork.connector
    try:
        for path in fork.contracts:
            contracts.add(path)
        installed = connectors.install(connector)
    except (TargetInputError, ValueError) as error:
        outbox.send(wire.NotReady(bad_input=True, message=str(error)))
        return
    outbox.send(wire.Ready(version, installed.replaces))
    answer = _Loop(Server(version, installed.name), outbox, Bookmark(bookmark_fd))
    while True:
        answer(inbox.get())


class _Loop:
    """Answers one message, and collects garbage now and then."""

    def __init__(self, server: Server, outbox: Outbox, bookmark: Bookmark) -> None:
        self._server = server
        self._outbox = outbox
        self._bookmark = bookmark
        self._num_cases = 0
        self._num_blocks = 0

    def __call__(self, message: wire.ToChild) -> None:
        if isinstance(message, wire.AskCpuTime):
            self._outbox.send(wire.CpuTime(message.case, time.process_time()))
            return
        if isinstance(message, wire.RunCases):
            self._run_cases(message)
            return
        if isinstance(message, wire.AskConnectorFile):
            self._outbox.send(_connector_file(message))
            return
        if isinstance(message, wire.AskRealTime):
            self._outbox.send(wire.CpuTime(message.case, self._real_time(message)))
            return
        scenario = wire.unpack_scenario(message.scenario)
        if isinstance(message, wire.RunCase):
            self._outbox.begin(message.case, message.flush)
            self._run(scenario, message.judged_by, message.defect, self._outbox.add)
            self._outbox.end()
        elif isinstance(message, wire.RunEngine):
            self._outbox.send(self._server.run_engine(scenario, message))
        elif isinstance(message, wire.AskStepTimes):
            seconds = self._server.step_times(scenario, message.num_warmup_steps, message.num_steps)
            self._outbox.send(wire.StepTimes(message.case, seconds))
        elif isinstance(message, wire.PlayTrace):
            self._server.play_trace(scenario, message, self._outbox.send)
        else:
            self._outbox.send(self._pool(message.case, scenario))
        self._collect(scenario.engine.blocks)

    def _run_cases(self, message: wire.RunCases) -> None:
        """Some cases of a campaign. The bookmark tells the parent which one killed us."""
        case, send = message.case, self._outbox.send
        cases, rules = wire.unpack_cases(message.cases), rules_of(message.judged_by)

        def run(scenario: Scenario) -> History:
            return self._history(scenario, message.judged_by, message.defect)

        shard = Shard(cases, rules, run, self._server.effective, partial(self._bookmark.put, case))
        shard.run_cases(message.start, message.stop, lambda news: send(wire.CasesNews(case, news)))
        coverage = shard.coverage.plain()
        send(wire.CasesDone(case, shard.num_cases, coverage, dict(shard.num_known), resident_bytes(), shard.seen))

    def _run(self, scenario: Scenario, judged_by: str, defect: str | None, emit: Callable[[Record], None]) -> None:
        try:
            self._server.run(scenario, judged_by, defect, emit)
        except Exception as error:  # a vLLM that cannot be read or driven; the next case may fare better
            emit(_unreadable(error))

    def _history(self, scenario: Scenario, judged_by: str, defect: str | None = None) -> History:
        history: History = []
        self._run(scenario, judged_by, defect, history.append)
        self._collect(scenario.engine.blocks)
        return history

    def _real_time(self, message: wire.AskRealTime) -> float:
        """Processor seconds of scheduler, connector, worker, painting, and reading memory and state back."""
        cases, rules = wire.unpack_cases(message.cases), rules_of(message.judged_by)
        scenarios = [cases.case(index, rules) for index in range(message.start, message.stop)]
        started = time.process_time()
        for scenario in scenarios:
            self._history(scenario, message.judged_by)
        return time.process_time() - started

    def _pool(self, case: int, scenario: Scenario) -> wire.StartupPool:
        try:
            return wire.StartupPool(case, self._server.startup_pool(scenario))
        except Exception as error:
            return wire.StartupPool(case, 0, refusal=f"{type(error).__name__}: {error}")

    def _collect(self, num_blocks: int) -> None:
        self._num_cases += 1
        self._num_blocks += num_blocks
        if self._num_cases >= _CASES_PER_COLLECTION or self._num_blocks >= _BLOCKS_PER_COLLECTION:
            gc.collect()
            gc.freeze()  # what is left is in use, as configurations that many scenarios share: no need to look at it again
            self._num_cases = self._num_blocks = 0


def _connector_file(message: wire.AskConnectorFile) -> wire.ConnectorFile:
    try:
        return wire.ConnectorFile(message.case, connectors.file_of(message.connector))
    except TargetInputError as error:
        return wire.ConnectorFile(message.case, None, str(error))


def _unreadable(error: Exception) -> Failure:
    """Not raised by vLLM while it ran, but by us while we drove it or looked inside."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    message = f"{error} ({Path(place.filename).name}, line {place.lineno})"
    return Failure(step=0, type=type(error).__name__, phase="child", message=message)
