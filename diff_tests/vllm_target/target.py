"""The parent's side of a target: a real vLLM in a child process, scenarios in, histories out.

A child lives for thousands of scenarios. If it dies, the case is run once more in a fresh one, which sends each record
at once: dying again is a finding about the case, else the case counts as lost once and the campaign goes on.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from diff_tests.vllm_target import connectors, wire
from diff_tests.vllm_target.defects import DEFECTS
from diff_tests.vllm_target.releases import (
    Source,
    TargetInputError,
    TargetStartError,
    base_version,
    cache_root,
    installed_version,
    resolve,
)
from sim.history import Failure, History
from sim.releases import NEWEST, RELEASES, Rules, rules_of
from sim.scenario import Scenario

__all__ = ["Target", "TargetInfo", "TargetInputError", "TargetStartError"]

# Scenarios handed over ahead of the one whose history is being read: the child never waits for us.
_PIPELINE_DEPTH = 8
# Importing vLLM takes seconds, its first look at a model architecture up to half a minute.
_START_TIMEOUT_S = 300.0
_PIPE_BYTES = 1 << 20
_READ_BYTES = 1 << 18


@dataclass(frozen=True)
class TargetInfo:
    """What runs. vllm: as asked for. version: what vLLM says of itself. rules: what to judge it by. known_release: an
    unmodified release that has rules of its own. connector: as asked for, None for each scenario's own."""

    vllm: str
    version: str
    rules: Rules
    known_release: bool
    connector: str | None


class _Died(Exception):
    """The child is gone, or does not answer. `failure` ends the history that it had sent so far."""

    def __init__(self, partial: History, failure: Failure, hangs: bool) -> None:
        self.history = [*partial, failure]
        self.hangs = hangs


class Target:
    """One vLLM with one connector, ready to run scenarios.

    vllm: `current`, a release, or a path. connector: a registered name, `module:Class` or a `.py` file; None leaves each
    scenario's own. defect: one of `defects.DEFECTS`, planted in every engine from now on. timeout_s: for one scenario. as_release: the
    release whose rules judge a target that is none itself. Raises TargetInputError on any of them being wrong.
    """

    def __init__(
        self,
        vllm: str = "current",
        connector: str | None = None,
        defect: str | None = None,
        timeout_s: float = 60.0,
        as_release: str | None = None,
    ) -> None:
        if as_release is not None and as_release not in RELEASES:
            raise TargetInputError(f"no rules for vLLM {as_release}; known: {', '.join(RELEASES)}")
        if defect is not None and defect not in DEFECTS:
            raise TargetInputError(f"no defect {defect!r}; known: {', '.join(DEFECTS)}")
        if connector is not None and connectors.is_file(connector):
            connectors.check_file(connector)
            connector = str(Path(connector).resolve())
        self.vllm = vllm
        self.lost = 0
        self._connector = connector
        self.defect = defect
        self._timeout_s = timeout_s
        self._as_release = as_release
        self._source: Source | None = None
        self._child: _Child | None = None
        self._info: TargetInfo | None = None
        self._next_case = 0

    def __enter__(self) -> Target:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def start(self) -> TargetInfo:
        """Starts the child unless it runs. Raises TargetInputError or TargetStartError."""
        if self._child is None:
            if self._source is None:
                self._source = resolve(self.vllm)
            self._child = _Child(self._source, self._connector)
            version = self._child.version
            known = self._source.kind != "path" and base_version(version) in RELEASES
            self._info = TargetInfo(self.vllm, version, self._rules(version), known, self._connector)
        assert self._info is not None
        return self._info

    @property
    def info(self) -> TargetInfo:
        """What runs; starts it if need be."""
        return self.start()

    def close(self) -> None:
        """Ends the child."""
        if self._child is not None:
            self._child.close()
            self._child = None

    def effective(self, scenario: Scenario) -> Scenario:
        """The scenario as the target runs it: with the connector under test in place of its own. To be judged."""
        return connectors.with_connector(scenario, connectors.contract_name(self._connector) if self._connector else None)

    def run(self, scenario: Scenario) -> History:
        """One scenario's history."""
        ((_, history),) = self.run_many([scenario])
        return history

    def run_many(self, scenarios: Iterable[Scenario]) -> Iterator[tuple[Scenario, History]]:
        """Histories in the order of the scenarios; the child works ahead while the caller looks at one."""
        self.start()
        source = iter(scenarios)
        ahead: deque[tuple[int, Scenario]] = deque()
        while True:
            for scenario in _take(source, _PIPELINE_DEPTH - len(ahead)):
                ahead.append((self._next_case, scenario))
                self._send(*ahead[-1])
                self._next_case += 1
            if not ahead:
                return
            history = self._result(ahead)
            _, scenario = ahead.popleft()
            yield scenario, history

    def startup_pool(self, scenario: Scenario) -> int:
        """The smallest pool, in blocks with the null block, that vLLM's own start-up check admits for the scenario's
        groups and limits. Raises ValueError where vLLM refuses the configuration at any size."""
        answer = self._ask(lambda case: wire.AskStartupPool(case, wire.pack_scenario(scenario)))
        assert isinstance(answer, wire.StartupPool)
        if answer.refusal is not None:
            raise ValueError(answer.refusal)
        return answer.num_blocks

    def step_times(self, scenario: Scenario, num_warmup_steps: int, num_steps: int) -> list[float]:
        """Seconds that vLLM's scheduler spends in each step after the warm-up, with all requests there from the start."""
        data = wire.pack_scenario(scenario)
        answer = self._ask(lambda case: wire.AskStepTimes(case, data, num_warmup_steps, num_steps))
        assert isinstance(answer, wire.StepTimes)
        return answer.seconds

    def cpu_seconds(self) -> float:
        """Processor time that the child has used so far."""
        answer = self._ask(wire.AskCpuTime)
        assert isinstance(answer, wire.CpuTime)
        return answer.seconds

    def _ask(self, question: Callable[[int], wire.ToChild]) -> wire.ToParent:
        """The child's answer to a question that is no case. Raises TargetStartError if it dies over it."""
        self.start()
        assert self._child is not None
        case = self._next_case
        self._next_case += 1
        self._child.send(question(case))
        try:
            return self._child.answer(case, self._timeout_s)
        except _Died as death:
            self._drop_child()
            raise TargetStartError(death.history[-1].message) from None  # type: ignore[union-attr]

    # -- results, and what to do without -------------------------------------------------------------------------------

    def _result(self, ahead: deque[tuple[int, Scenario]]) -> History:
        """The history of the first of the scenarios that the child has."""
        assert self._child is not None
        case, scenario = ahead[0]
        try:
            return self._child.history(case, self._timeout_s)
        except _Died as death:
            history = death.history
            if not death.hangs:
                history = self._once_more(case, scenario)
            else:
                self._restart()
            for later in list(ahead)[1:]:
                self._send(*later)
            return history

    def _once_more(self, case: int, scenario: Scenario) -> History:
        """Runs a case alone in a fresh child."""
        self._restart()
        self._send(case, scenario, flush=True)
        assert self._child is not None
        try:
            history = self._child.history(case, self._timeout_s)
        except _Died as death:
            self._restart()
            return death.history
        self.lost += 1
        return history

    def _restart(self) -> None:
        self._drop_child()
        self.start()

    def _drop_child(self) -> None:
        assert self._child is not None
        self._child.kill()
        self._child = None

    def _send(self, case: int, scenario: Scenario, flush: bool = False) -> None:
        assert self._child is not None
        assert self._info is not None
        message = wire.RunCase(case, wire.pack_scenario(scenario), self._info.rules.release, flush, self.defect)
        self._child.send(message)

    # -- which rules ---------------------------------------------------------------------------------------------------

    def _rules(self, version: str) -> Rules:
        """A release is judged by its own rules; anything else by `as_release` or the newest."""
        if self._as_release is not None:
            return rules_of(self._as_release)
        release = base_version(version)
        return rules_of(release if release in RELEASES else NEWEST)


def _take(source: Iterator[Scenario], count: int) -> Iterator[Scenario]:
    for _ in range(count):
        try:
            yield next(source)
        except StopIteration:
            return


# ------------------------------------------------------------------------------------------------------------- the child


class _Child:
    """A running child process and the pipes to it."""

    def __init__(self, source: Source, connector: str | None) -> None:
        """Returns when vLLM is imported. Raises TargetInputError or TargetStartError."""
        requests_read, self._requests = os.pipe()
        self._answers, answers_write = os.pipe()
        for fd in (self._requests, self._answers):
            with contextlib.suppress(OSError):  # a larger pipe only saves switches between us
                fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        command = [sys.executable, "-P", "-m", "diff_tests.vllm_target.child"]
        command += ["--requests", str(requests_read), "--answers", str(answers_write)]
        command += ["--connector", connector] if connector else []
        # What vLLM prints; only its last lines matter, and only if it dies.
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the child
        try:
            self._process = subprocess.Popen(
                command,
                env=_environment(source),
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                pass_fds=(requests_read, answers_write),
                start_new_session=True,  # Ctrl-C in a terminal reaches us, not the child
            )
        finally:
            os.close(requests_read)
            os.close(answers_write)
        self._buffer = bytearray()
        self.version = self._wait_until_ready()

    def _wait_until_ready(self) -> str:
        try:
            message = self._next_message(time.monotonic() + _START_TIMEOUT_S)
        except BaseException as error:
            why = self._how_it_ended() if isinstance(error, _Closed) else f"no answer in {_START_TIMEOUT_S:g} seconds"
            self.kill()
            if isinstance(error, (_Silence, _Closed)):
                raise TargetStartError(f"vLLM could not be started: {why}\n{self._last_lines()}") from None
            raise
        if isinstance(message, wire.NotReady):
            self.kill()
            if message.bad_input:
                raise TargetInputError(message.message)
            raise TargetStartError(f"vLLM could not be started: {message.message}")
        assert isinstance(message, wire.Ready)
        return message.version

    def send(self, message: wire.ToChild) -> None:
        """Hands a message over. A child that is gone shows when its answer is read."""
        data = memoryview(wire.frame(message))
        with contextlib.suppress(BrokenPipeError):
            while data:
                data = data[os.write(self._requests, data) :]

    def history(self, case: int, timeout_s: float) -> History:
        """The whole history of a case. Raises _Died with what there is of it."""
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
        """The single answer to a case. Raises _Died."""
        deadline = time.monotonic() + timeout_s
        try:
            while True:
                message = self._next_message(deadline)
                if getattr(message, "case", None) == case:
                    return message
        except (_Silence, _Closed) as end:
            raise self._died([], end, timeout_s) from None

    def _died(self, partial: History, end: Exception, timeout_s: float) -> _Died:
        step = getattr(partial[-1], "step", 0) if partial else 0
        hangs = isinstance(end, _Silence)
        if hangs:
            return _Died(
                partial,
                Failure(step=step, type="Hang", phase="child", message=f"no end after {timeout_s:g} seconds"),
                hangs,
            )
        return _Died(partial, Failure(step=step, type="ChildDied", phase="child", message=self._how_it_ended()), hangs)

    def _next_message(self, deadline: float) -> wire.ToParent:
        header = self._read(wire.HEADER_BYTES, deadline)
        return wire.decode_to_parent(self._read(wire.body_length(header), deadline))

    def _read(self, num_bytes: int, deadline: float) -> bytes:
        buffer = self._buffer
        while len(buffer) < num_bytes:
            ready, _, _ = select.select([self._answers], [], [], max(deadline - time.monotonic(), 0))
            if not ready:
                raise _Silence
            part = os.read(self._answers, _READ_BYTES)
            if not part:
                raise _Closed
            buffer += part
        taken = bytes(buffer[:num_bytes])
        del buffer[:num_bytes]
        return taken

    def _how_it_ended(self) -> str:
        try:
            code = self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            return "closed its pipe"
        if code < 0:
            return f"killed by signal {-code}"
        return f"exit code {code}: {self._last_lines(1)}"

    def _last_lines(self, count: int = 5) -> str:
        self._output.seek(0, os.SEEK_END)
        self._output.seek(max(self._output.tell() - 4096, 0))
        lines = self._output.read().decode(errors="replace").splitlines()
        return "\n".join([line for line in lines if line.strip()][-count:])

    def close(self) -> None:
        """Lets the child end by itself: it does when its pipe closes."""
        os.close(self._requests)
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._kill_group()
        os.close(self._answers)
        self._output.close()

    def kill(self) -> None:
        """Ends the child at once, with whatever it has started."""
        self._kill_group()
        self._process.wait()
        os.close(self._requests)
        os.close(self._answers)

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


class _Silence(Exception):
    """Nothing came in time."""


class _Closed(Exception):
    """The other end of the pipe is gone."""


def _environment(source: Source) -> dict[str, str]:
    """The child's environment: the chosen vLLM first, ourselves next; quiet, offline, deterministic, one thread."""
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
        # What vLLM remembers of model architectures. Releases that shared a folder would evict each other's entries.
        "VLLM_CACHE_ROOT": str(cache_root() / "state" / _state_name(source)),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }


def _state_name(source: Source) -> str:
    if source.kind == "release":
        return source.name
    if source.kind == "current":
        return f"current-{installed_version()}"
    return hashlib.sha256(str(source.folder).encode()).hexdigest()[:16]
