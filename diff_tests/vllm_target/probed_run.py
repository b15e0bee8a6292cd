"""Runs scenarios in a process of their own and prints what any connector's metadata says, in plain form.

`python -m diff_tests.vllm_target.probed_run` reads JSON lines [scenario, whether the worker side runs too] and prints for
each the history as JSON lines, then `{"metadata": [as built and as received, step by step]}` and an empty line; a line
`{"unavailable": reason}` where the connector does not run here.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import msgspec

from diff_tests.vllm_target import configs, scheduler_driver
from diff_tests.vllm_target.kvprobe import Plain, Secret
from diff_tests.vllm_target.worker import Worker
from sim.history import Refusal, Selections
from sim.releases import NEWEST
from sim.scenario import parse

_plain = Plain(Secret("the same on both sides"))
_metadata: list[Any] = []


class SchedulerSideOnly:
    """Stands in for a worker whose connector needs a device or a service."""

    written_at_start = None

    def __init__(self, *_: Any) -> None:
        pass

    def receive(self, metadata: Any) -> None:
        return None

    def act(self, received: None) -> None:
        return None


class PlainWorker(Worker):
    """The real worker side; what it is told is noted."""

    def receive(self, metadata: Any) -> Selections | None:
        received = super().receive(metadata)
        _metadata.append(_plain.of(self.connector._get_connector_metadata()))
        return received


def main() -> None:
    """See the module."""
    configs.warm_up()
    drivers: Any = scheduler_driver
    told = drivers.told

    def noting(metadata: Any, *rest: Any) -> Any:
        _metadata.append(_plain.of(metadata))
        return told(metadata, *rest)

    drivers.told = noting
    for line in sys.stdin:
        raw, with_worker = json.loads(line)
        drivers.worker_of = PlainWorker if with_worker else SchedulerSideOnly
        records: list[Any] = []
        _metadata.clear()
        scheduler_driver.run(parse(raw), NEWEST, None, None, records.append)
        if isinstance(records[0], Refusal):
            print(json.dumps({"unavailable": f"{records[0].type}: {records[0].message}"}))
        else:
            for record in records:
                print(msgspec.json.encode(record).decode())
            print(json.dumps({"metadata": _metadata}))
        print(flush=True)


if __name__ == "__main__":
    main()
