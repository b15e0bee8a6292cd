"""Law 4, the other half: what the connector answers when the scheduler asks it for external tokens."""

from __future__ import annotations

from collections import Counter

from oracle.laws.trial import Trial, law
from sim.connector import ConnectorRule
from sim.history import Acted, Scheduled, Updated


class Dialogue:
    """The contract's side of the dialogue between scheduler and connector, followed through a history.

    `_forgetful` answers as the contract says; `_unforgetting` as a connector would that never hears of a request's end.
    """

    def __init__(self, forgetful: ConnectorRule, unforgetting: ConnectorRule) -> None:
        self._forgetful = forgetful
        self._unforgetting = unforgetting
        self._num_outputs: Counter[str] = Counter()

    def num_outputs(self, request: str) -> int:
        """Tokens generated for the request so far."""
        return self._num_outputs[request]

    def answers(self, request: str, num_tokens: int, num_local: int) -> tuple[int | None, int | None]:
        """External tokens that are right, and those that a connector would answer which forgets nobody."""
        right, _ = self._forgetful.matched(request, num_tokens, num_local)
        stale, _ = self._unforgetting.matched(request, num_tokens, num_local)
        return right, stale

    def granted(self, request: str, num_external: int) -> None:
        """The scheduler admits the request."""
        self._forgetful.allocated(request, num_external)
        self._unforgetting.allocated(request, num_external)

    def gained(self, request: str, num_tokens: int) -> None:
        """Output arrived."""
        self._num_outputs[request] += num_tokens

    def ended(self, request: str) -> None:
        """The request finished or was aborted; its ID may come again."""
        self._forgetful.finished(request)
        del self._num_outputs[request]


@law(
    4,
    "Every question of the scheduler is answered with as many external tokens as the contract promises.",
    (Scheduled, Updated, Acted),
    judges_direct=True,
)
def check_answers(trial: Trial, record: Scheduled | Updated | Acted) -> None:
    """Law 4, answers. A request is asked about at most once in a step, and granted what it is granted after that."""
    if trial.contract is None:
        return
    if trial.dialogue is None:
        rules = trial.contract.rule(), trial.contract.rule()
        if rules[0] is None or rules[1] is None:
            return  # they depend on what it keeps
        trial.dialogue = Dialogue(rules[0], rules[1])
    dialogue = trial.dialogue
    if isinstance(record, Scheduled):
        for request, num_local, answered in record.asked or ():
            _check_answer(trial, dialogue, request, num_local, answered)
            dialogue.granted(request, record.external.get(request, 0))
    elif isinstance(record, Updated):
        for request, num_tokens in record.new_tokens.items():
            dialogue.gained(request, num_tokens)
        for request in record.finished:
            dialogue.ended(request)
    elif record.action == "abort" and record.result in ("done", "delayed") and record.request is not None:
        dialogue.ended(record.request)


def _check_answer(trial: Trial, dialogue: Dialogue, request: str, num_local: int, answered: int | None) -> None:
    num_tokens = trial.replay.num_prompt(request) + dialogue.num_outputs(request)
    right, stale = dialogue.answers(request, num_tokens, num_local)
    if answered == right:
        return
    message = (
        f"{num_tokens} tokens, {num_local} of them local: the connector answers {answered} external tokens, not {right}"
    )
    if answered == stale:
        cause = "request_not_forgotten"
        message += "; it takes the request for an earlier one of the same ID that has ended"
    else:
        cause = "too_few_external" if (answered or 0) < (right or 0) else "too_many_external"
    trial.report("hit", 4, cause, message, request=request, expected=right, observed=answered)


@law(
    8,
    "A connector that stores nothing lets the blocks of a request go when it ends.",
    (Acted,),
    judges_direct=True,
)
def check_kept_blocks(trial: Trial, record: Acted) -> None:
    """Law 8, the connector's part: nobody would ever say that such blocks are free."""
    if record.result == "delayed" and trial.contract is not None and trial.contract.writes == "constant":
        message = "the connector asks to keep the blocks of a request that has ended, though it stores nothing"
        trial.report("pool", 8, "blocks_kept", message, request=record.request)
