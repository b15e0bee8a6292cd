"""The matrix over HTTP: requests with token IDs as prompts, as many at a time as the matrix says."""

from __future__ import annotations

import threading
from typing import Any

from diff_tests.vllm_target.api_server import ApiServer
from diff_tests.vllm_target.engine.tokens import VocabularyTokens
from sim.scenario import Add, Scenario, Step

_REQUEST_TIMEOUT_S = 300.0


class Client:
    """Takes the steps of a scenario as a client can: `add` sends a request, `step` waits until the one sent last has its
    first token, `run` waits for all. errors: what went wrong, by request."""

    def __init__(self, server: ApiServer, vocabulary_size: int) -> None:
        self._server = server
        self._vocabulary_size = vocabulary_size
        self._threads: list[threading.Thread] = []
        self._has_started = threading.Event()
        self.errors: dict[str, str] = {}

    def run(self, scenario: Scenario) -> None:
        """All steps. Requests that fail are noted; the others go on."""
        tokens = VocabularyTokens(scenario, self._vocabulary_size)
        for step in scenario.steps:
            if isinstance(step, Add):
                self._send(step, tokens)
            elif isinstance(step, Step):
                self._has_started.wait(_REQUEST_TIMEOUT_S)
            else:
                self._wait_for_all()
        self._wait_for_all()

    def _send(self, add: Add, tokens: VocabularyTokens) -> None:
        body = {
            "prompt": tokens.prompt(add),
            "max_tokens": add.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "allowed_token_ids": [tokens.output(add.id)],
            "return_token_ids": True,
            "request_id": add.id,
        }
        self._has_started = threading.Event()
        thread = threading.Thread(target=self._complete, args=(add.id, body, self._has_started), daemon=True)
        self._threads.append(thread)
        thread.start()

    def _complete(self, request_id: str, body: dict[str, Any], has_started: threading.Event) -> None:
        try:
            self._server.complete(body, _REQUEST_TIMEOUT_S, has_started.set)
        except OSError as error:
            self.errors[request_id] = str(error)
        has_started.set()

    def _wait_for_all(self) -> None:
        for thread in self._threads:
            thread.join(_REQUEST_TIMEOUT_S)
        self._threads = []


def our_name(vllm_id: str) -> str:
    """The request that the server's ID stands for: `cmpl-A-0` is A."""
    name = vllm_id.removeprefix("cmpl-")
    return name.removesuffix("-0") if name != vllm_id else vllm_id
