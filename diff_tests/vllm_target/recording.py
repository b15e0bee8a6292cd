"""What both drivers share: emitting records, and turning what vLLM raises into the last one."""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from sim.history import Failure, Record, Scheduled

Emit = Callable[[Record], None]


class Stop(Exception):
    """vLLM raised; the history has its last record."""


class Recorder:
    """Emits records. `step` is the number of the last step, from 1."""

    def __init__(self, emit: Emit) -> None:
        self.emit = emit
        self.step = 0

    @contextmanager
    def failing(self, phase: str) -> Iterator[None]:
        """Whatever vLLM raises inside is the end of the history."""
        try:
            yield
        except Exception as error:
            self.fail(phase, error)

    def fail(self, phase: str, error: Exception) -> None:
        """Emits the last record and raises Stop."""
        frames = _vllm_frames(error)
        if phase != "worker" and any(isinstance(frame.f_locals.get("self"), KVConnectorBase_V1) for frame, _ in frames):
            phase = "connector"
        self.emit(
            Failure(
                step=self.step,
                type=type(error).__name__,
                phase=phase,
                message=str(error),
                trail=[frame.f_code.co_qualname for frame, _ in frames],
                line=_source_line(*frames[-1]) if frames else "",
            )
        )
        raise Stop from error

    def let_worker_act(self, worker: Any, metadata: Any, record: Scheduled) -> None:
        """The worker's half of a step. If it raises, the record of the step still goes out before the failure."""
        try:
            record.received = worker.receive(metadata)
            record.written = worker.act(record.received)
        except Exception as error:
            self.emit(record)
            self.fail("worker", error)


def _vllm_frames(error: Exception) -> list[tuple[FrameType, int]]:
    """The frames of vLLM and of connectors that an exception came through, from outside in, with line numbers."""
    frames = list(traceback.walk_tb(error.__traceback__))
    return [(frame, number) for frame, number in frames if _is_vllm(frame)]


def _is_vllm(frame: FrameType) -> bool:
    module = str(frame.f_globals.get("__name__", ""))
    return module.startswith("vllm.") or isinstance(frame.f_locals.get("self"), KVConnectorBase_V1)


def _source_line(frame: FrameType, number: int) -> str:
    return linecache.getline(frame.f_code.co_filename, number, frame.f_globals).strip()


class Watch:
    """Notes what a connector is asked, and what it is granted, tables included, without changing either."""

    def __init__(self, connector: Any) -> None:
        self.asked: list[tuple[str, int, int | None]] = []
        self.external: dict[str, int] = {}
        self.tables: dict[str, list[list[int]]] = {}
        ask, grant = connector.get_num_new_matched_tokens, connector.update_state_after_alloc

        def get_num_new_matched_tokens(request: Any, num_computed_tokens: int) -> Any:
            answer = ask(request, num_computed_tokens)
            _check_answer(answer)
            self.asked.append((request.request_id, num_computed_tokens, answer[0]))
            return answer

        def update_state_after_alloc(request: Any, blocks: Any, num_external_tokens: int) -> Any:
            self.external[request.request_id] = num_external_tokens
            if num_external_tokens:
                self.tables[request.request_id] = [list(table) for table in blocks.get_block_ids()]
            return grant(request, blocks, num_external_tokens)

        connector.get_num_new_matched_tokens = get_num_new_matched_tokens
        connector.update_state_after_alloc = update_state_after_alloc

    def clear(self) -> None:
        """Forgets what was noted: a new step begins."""
        self.asked = []
        self.external = {}
        self.tables = {}

    def forget(self, request_id: str) -> None:
        """The request is gone before the step in which it would have been admitted: nothing that was answered counts."""
        self.asked = [asked for asked in self.asked if asked[0] != request_id]


def _check_answer(answer: Any) -> None:
    """Raises TypeError where a connector answers in another form than vLLM's interface has it: what the scheduler would
    make of that is chance."""
    if isinstance(answer, tuple) and len(answer) == 2:
        num_external, loads_later = answer
        if (num_external is None or type(num_external) is int) and isinstance(loads_later, bool):
            return
    raise TypeError(f"the connector answers {answer!r}; it must be a number of tokens or None, and True or False")
