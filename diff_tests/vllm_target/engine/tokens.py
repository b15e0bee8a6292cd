"""Token IDs of a small vocabulary for a scenario's streams."""

from __future__ import annotations

from sim.scenario import FIRST_TOKEN, Add, Scenario, ScenarioError


class VocabularyTokens:
    """Token i of a stream has one ID, distinct for distinct (stream, i), as in the scenario; everything that a request
    generates has one ID of its own, which no prompt and no other request has.

    Raises ScenarioError where the vocabulary is too small for that.
    """

    def __init__(self, scenario: Scenario, vocabulary_size: int) -> None:
        adds = [step for step in scenario.steps if isinstance(step, Add)]
        num_tokens: dict[str, int] = {}
        for add in adds:
            for span in add.prompt:
                num_tokens[span.stream] = max(num_tokens.get(span.stream, 0), span.start + span.count)
        num_tokens |= {add.id + ".out": 1 for add in adds}
        self._first: dict[str, int] = {}
        next_token = FIRST_TOKEN
        for stream, count in num_tokens.items():
            self._first[stream] = next_token
            next_token += count
        if next_token > vocabulary_size:
            raise ScenarioError("$.steps", f"{next_token} different tokens, in a vocabulary of {vocabulary_size}")

    def prompt(self, add: Add) -> list[int]:
        """The token IDs of a request's prompt."""
        ids: list[int] = []
        for span in add.prompt:
            first = self._first[span.stream] + span.start
            ids.extend(range(first, first + span.count))
        return ids

    def output(self, request_id: str) -> int:
        """The ID of every token generated for a request."""
        return self._first[request_id + ".out"]
