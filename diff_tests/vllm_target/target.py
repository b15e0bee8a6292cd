"""The parent's side of a target: a real vLLM in a child process, scenarios in, histories out.

A child lives for thousands of scenarios. If it dies, the case is run once more in a fresh one, which sends each record
at once: dying again is a finding about the case, else the case counts as lost once and the campaign goes on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from diff_tests.shard import Cases
from diff_tests.vllm_target import connectors, wire
from diff_tests.vllm_target.defects import DEFECTS
from diff_tests.vllm_target.platforms import lacks_kernels
from diff_tests.vllm_target.processes import Child, Died
from diff_tests.vllm_target.releases import Source, TargetInputError, TargetStartError, base_version, resolve
from diff_tests.workload.trace import Labels
from sim.history import History
from sim.releases import NEWEST, RELEASES, Rules, rules_of
from sim.scenario import Scenario

__all__ = ["Target", "TargetInfo", "TargetInputError", "TargetStartError"]

# Scenarios handed over ahead of the one whose history is being read: the child never waits for us.
_PIPELINE_DEPTH = 8


@dataclass(frozen=True)
class TargetInfo:
    """What runs. vllm: as asked for. version: what vLLM says of itself. rules: what to judge it by. known_release: an
    unmodified release that has rules of its own. connector: as asked for, None for each scenario's own. replaces: the
    registered connector whose place a connector file takes."""

    vllm: str
    version: str
    rules: Rules
    known_release: bool
    connector: str | None
    replaces: str | None = None


@dataclass(frozen=True)
class Alone:
    """The index-th case of a campaign, run apart from the others because its child died or hung over it."""

    index: int
    scenario: Scenario
    history: History


CasesMessage = wire.CasesNews | wire.CasesDone | Alone


class Target:
    """One vLLM with one connector, ready to run scenarios.

    vllm: `current`, a release, or a path. connector: a registered name, `module:Class` or a `.py` file; None leaves
    each scenario's own. defect: one of `defects.DEFECTS`, planted in every engine from now on. timeout_s: for one
    scenario. as_release: the release whose rules judge a target that is none itself. lost: cases that a child took with
    it when it died, and that went well in the next. device: where KV memory lies, `cpu` or `cuda`. for_engines: for whole
    engines, which need a platform. Raises TargetInputError where one of them is wrong.
    """

    def __init__(
        self,
        vllm: str = "current",
        connector: str | None = None,
        defect: str | None = None,
        timeout_s: float = 60.0,
        as_release: str | None = None,
        device: str = "cpu",
        for_engines: bool = False,
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
        self._device = device
        self._for_engines = for_engines
        self._source: Source | None = None
        self._child: Child | None = None
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
                self._source = self._resolved()
            self._child = Child(self._source, self._connector, self._device)
            version = self._child.version
            known = self._source.kind != "path" and base_version(version) in RELEASES
            self._info = TargetInfo(self.vllm, version, self._rules(version), known, self._connector, self._child.replaces)
        assert self._info is not None
        return self._info

    def _resolved(self) -> Source:
        source = resolve(self.vllm)
        return replace(source, platform="cpu") if self._for_engines and lacks_kernels(source) else source

    @property
    def info(self) -> TargetInfo:
        """What runs; starts it if need be."""
        return self.start()

    @property
    def source(self) -> Source:
        """Where its vLLM comes from; starts it if need be."""
        self.start()
        assert self._source is not None
        return self._source

    @property
    def replacing_file(self) -> str | None:
        """The file that replaces the installed connector, if one does."""
        return self._connector if self._connector is not None and connectors.is_file(self._connector) else None

    def close(self) -> None:
        """Ends the child."""
        if self._child is not None:
            self._child.close()
            self._child = None

    def kill(self) -> None:
        """Ends the child at once, also while another thread waits for its answer, which then gets `Died`."""
        if self._child is not None:
            self._child.stop()

    @property
    def pid(self) -> int | None:
        """The child's process ID; None while there is no child."""
        return self._child.pid if self._child is not None else None

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

    def sibling(self) -> Target:
        """Another target of the same kind: one more child, of the same host."""
        return Target(
            self.vllm, self._connector, self.defect, self._timeout_s, self._as_release, self._device, self._for_engines
        )

    def run_cases(self, cases: Cases, start: int, stop: int) -> Iterator[CasesMessage]:
        """Has the child generate, run and judge the cases [start, stop). News come when the cases that they are among
        are through, so that nothing is told twice if the child dies in between: then the case that killed it is run
        alone (`Alone`, to be judged by the caller), and those around it again. Raises TargetStartError."""
        release, data = self.info.rules.release, wire.pack_cases(cases)
        left = [(start, stop)]
        was_idle = False
        while left:
            first, last = left.pop()
            if first == last:
                continue
            question = self._next_case
            news: list[CasesMessage] = []
            try:
                for message in self._answers(
                    partial(wire.RunCases, cases=data, start=first, stop=last, judged_by=release, defect=self.defect)
                ):
                    if isinstance(message, wire.CasesNews):
                        news.append(message)
                    elif isinstance(message, wire.CasesDone):
                        yield from news
                        yield message
                        break
            except Died as death:
                assert self._child is not None
                killer = self._child.case_at_hand(question)
                if killer is None:  # it had died before, or it cannot live
                    self._drop_child()
                    if was_idle:
                        raise TargetStartError(death.failure.message) from None
                    was_idle = True
                    left.append((first, last))
                    continue
                yield self._alone(cases, killer)
                left += [(killer + 1, last), (first, killer)]

    def _answers(self, question: Callable[[int], wire.ToChild]) -> Iterator[wire.ToParent]:
        """What the child sends about a question, without end: the caller knows the last answer. Raises Died."""
        self.start()
        assert self._child is not None
        case = self._next_case
        self._next_case += 1
        self._child.send(question(case))
        while True:
            yield self._child.answer(case, self._timeout_s)

    def _alone(self, cases: Cases, index: int) -> Alone:
        """Runs a case that killed its child, or hung, once more: what there is of its history if it does so again."""
        assert self._info is not None
        scenario = cases.case(index, self._info.rules)
        self._next_case += 1
        return Alone(index, self.effective(scenario), self._once_more(self._next_case - 1, scenario))

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

    def play_trace(
        self, scenario: Scenario, path: Path, labels: Labels, hash_block_size: int, arrivals: str, limit: int | None
    ) -> Iterator[wire.TraceSteps]:
        """Plays a request trace to the real scheduler of the scenario's engine, message by message as it goes. Raises
        TargetStartError if the child dies over it."""
        data = wire.pack_scenario(scenario)
        answers = self._answers(
            lambda case: wire.PlayTrace(case, data, str(path.resolve()), tuple(labels), hash_block_size, arrivals, limit)
        )
        try:
            for message in answers:
                assert isinstance(message, wire.TraceSteps)
                yield message
                if message.last:
                    return
        except Died as death:
            self._drop_child()
            raise TargetStartError(death.failure.message) from None

    def connector_file(self, connector: str) -> Path:
        """The file in which this vLLM defines a connector. Raises TargetInputError."""
        answer = self._ask(lambda case: wire.AskConnectorFile(case, connector))
        assert isinstance(answer, wire.ConnectorFile)
        if answer.path is None:
            raise TargetInputError(answer.error or connector)
        return Path(answer.path)

    def real_seconds(self, cases: Cases, start: int, stop: int) -> float:
        """Processor time that the cases [start, stop) cost the child when nobody judges them."""
        release, data = self.info.rules.release, wire.pack_cases(cases)
        answer = self._ask(lambda case: wire.AskRealTime(case, data, start, stop, release))
        assert isinstance(answer, wire.CpuTime)
        return answer.seconds

    def run_engine(self, settings: dict[str, Any], scenario: Scenario, plugins: Path) -> wire.EngineEnd:
        """Starts a real engine with these arguments in the child, once in its life, and takes the scenario's steps.
        plugins: a folder for the module path of every process of the engine."""
        data = wire.pack_scenario(scenario)
        answer = self._ask(lambda case: wire.RunEngine(case, data, settings, str(plugins)))
        assert isinstance(answer, wire.EngineEnd)
        return answer

    def cpu_seconds(self) -> float:
        """Processor time that the child has used so far."""
        answer = self._ask(wire.AskCpuTime)
        assert isinstance(answer, wire.CpuTime)
        return answer.seconds

    def _ask(self, question: Callable[[int], wire.ToChild]) -> wire.ToParent:
        """The child's answer to a question that is no case. Raises TargetStartError if it dies over it."""
        try:
            return next(self._answers(question))
        except Died as death:
            self._drop_child()
            raise TargetStartError(death.failure.message) from None

    # -- results, and what to do without -------------------------------------------------------------------------------

    def _result(self, ahead: deque[tuple[int, Scenario]]) -> History:
        """The history of the first of the scenarios that the child has."""
        assert self._child is not None
        case, scenario = ahead[0]
        try:
            return self._child.history(case, self._timeout_s)
        except Died as death:
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
        except Died as death:
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
