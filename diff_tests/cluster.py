"""The jobs of a campaign on a Ray cluster: the same shares, the same findings, on more machines.

Every machine needs kvoracle, the vLLM under test and, where they are given, the connector's file at the same path and the
module of its contract. Ray starts a lost share again on another worker.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from diff_tests.campaign import Share, ShareResult, Shares
from diff_tests.shard import Cases
from diff_tests.vllm_target.target import Target
from oracle import contracts

SHARES_AHEAD = 2
"""Shares handed over for each core of the cluster, so that none waits for us."""
MOST_RETRIES = 20
"""Times that one share may lose its worker."""


class ClusterError(RuntimeError):
    """There is no such cluster, or Ray is not installed; one sentence with the remedy."""


@dataclass(frozen=True)
class TargetSettings:
    """How a worker starts its target."""

    vllm: str
    connector: str | None
    defect: str | None
    as_release: str | None
    contracts: tuple[str, ...] = ()  # of connectors from outside, as `module:Class`


_targets: dict[TargetSettings, Target] = {}


def run_share(settings: TargetSettings, cases: Cases, share: Share) -> ShareResult:
    """In a worker: runs and judges one share. A worker keeps its target for the next. Raises ValueError for a contract
    that this machine does not have."""
    target = _targets.get(settings)
    if target is None:
        for path in settings.contracts:
            contracts.add(path)
        target = _targets[settings] = Target(
            settings.vllm, settings.connector, settings.defect, as_release=settings.as_release
        )
    lost_before = target.lost
    messages = list(target.run_cases(cases, *share))
    return ShareResult(share, messages, target.lost - lost_before)


class RayCrew:
    """Hands shares to a cluster. cases: among which a case is. address: of a running cluster, `auto` for the one of this
    machine, empty: start one here with `num_cores` workers. Raises ClusterError."""

    def __init__(
        self,
        settings: TargetSettings,
        cases: Callable[[int], Cases],
        shares: Shares,
        address: str,
        num_cores: int,
        deadline: float | None,
    ) -> None:
        try:
            import ray
        except ImportError:
            raise ClusterError("--ray needs Ray; install kvoracle[ray]") from None
        self._ray: Any = ray
        self._settings, self._cases, self._shares, self._deadline = settings, cases, shares, deadline
        self._is_ours = not ray.is_initialized()
        self.lost = 0
        if self._is_ours:
            self._connect(address, num_cores)

    def _connect(self, address: str, num_cores: int) -> None:
        quiet: dict[str, Any] = {"log_to_driver": False, "include_dashboard": False, "logging_level": logging.ERROR}
        try:
            if address:
                self._ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
            else:
                self._ray.init(num_cpus=num_cores, **quiet)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise ClusterError(f"--ray {address}: no cluster there: {error}") from None

    def results(self) -> Iterator[ShareResult]:
        """The shares as they end, until all are through or time is up. Raises what a worker raised, at the last."""
        task = self._ray.remote(num_cpus=1, max_retries=MOST_RETRIES)(run_share)
        num_ahead = max(1, int(self._ray.cluster_resources().get("CPU", 1))) * SHARES_AHEAD
        pending: list[Any] = []
        while True:
            while len(pending) < num_ahead and not self._is_time_up() and (share := self._shares.take()) is not None:
                pending.append(task.remote(self._settings, self._cases(share[0]), share))
            if not pending:
                return
            (ended, *_), pending = self._ray.wait(pending, num_returns=1)
            result: ShareResult = self._ray.get(ended)
            self.lost += result.num_lost
            yield result

    def _is_time_up(self) -> bool:
        return self._deadline is not None and time.monotonic() >= self._deadline

    def close(self) -> None:
        """Leaves the cluster; one that was started here ends."""
        if self._is_ours:
            self._ray.shutdown()
