"""What the model has to know of a KV connector: how it answers the scheduler."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Protocol


class ConnectorRule(Protocol):
    """The answers of one connector over one run. The oracle's contracts provide it; the model only asks.

    requires_kv_delivery: the connector gives a preempted request its external tokens again only if it is told so; vLLM
    then drops the output that is still in flight. restores_windows: its loads bring the last window of sliding-window
    groups that are not cached, so nothing has to be computed again.
    """

    requires_kv_delivery: bool
    restores_windows: bool

    def matched(self, request_id: str, num_tokens: int, num_local: int) -> tuple[int | None, bool]:
        """External tokens beyond `num_local` local ones for a request of `num_tokens` tokens, and whether they load
        asynchronously. None: ask again in a later step."""

    def allocated(self, request_id: str, num_external: int) -> None:
        """Blocks were allocated for an admitted request, `num_external` tokens of it external (also 0)."""

    def finished(self, request_id: str) -> None:
        """The request ended, or was aborted."""


class GivenAnswers:
    """A connector that answers as it did in an observed run, request by request, in order; 0 beyond that."""

    restores_windows = False

    def __init__(self, asked: Iterable[tuple[str, int, int | None]], loads_later: bool, requires_kv_delivery: bool) -> None:
        """asked: (request, local tokens, answer) in order; loads_later: of all tokens that it gives."""
        self.requires_kv_delivery = requires_kv_delivery
        self._loads_later = loads_later
        self._left: dict[str, deque[int | None]] = {}
        for request_id, _, answer in asked:
            self._left.setdefault(request_id, deque()).append(answer)

    def matched(self, request_id: str, num_tokens: int, num_local: int) -> tuple[int | None, bool]:
        """See ConnectorRule."""
        left = self._left.get(request_id)
        answer = left.popleft() if left else 0
        return answer, self._loads_later and bool(answer)

    def allocated(self, request_id: str, num_external: int) -> None:
        """Its further answers are known."""

    def finished(self, request_id: str) -> None:
        """Its further answers are known."""
