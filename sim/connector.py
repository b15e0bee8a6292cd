"""What the model has to know of a KV connector: how it answers the scheduler."""

from __future__ import annotations

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
