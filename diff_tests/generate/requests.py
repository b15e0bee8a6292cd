"""The requests of a case: prompts that share tokens with each other, lengths at block boundaries."""

from __future__ import annotations

from diff_tests.generate.draft import Draft, RequestDraft
from sim.scenario import Span

MAX_PROMPT_TOKENS = 110


def make_requests(draft: Draft) -> None:
    """Adds the requests to the draft, in order of arrival."""
    num_requests = draft.chooser.one_of((3, 2, 4, 1, 5, 6))
    for request_index in range(num_requests):
        draft.requests.append(_make_request(draft, request_index))


def _make_request(draft: Draft, request_index: int) -> RequestDraft:
    chooser, on = draft.chooser, draft.on
    request = RequestDraft(
        prompt=_choose_prompt(draft, request_index),
        max_tokens=chooser.one_of((1, 2, 4, chooser.integer(1, 20))),
        salt=chooser.one_of((None, "x", "y")) if "salts" in on else None,
        lora=chooser.one_of((None, "x", "y")) if "loras" in on else None,
        priority=chooser.integer(0, 2) if "priority" in on else 0,
        skip_cache="skip_cache" in on and chooser.flag(0.35),
    )
    request.embeds = "embeds" in on and chooser.flag(0.5)
    if "encoder" in on and chooser.flag(0.8):
        request.encoder = draft.near_multiple(draft.base_block, 4)
    if draft.is_scripted and chooser.flag(0.8):
        request.external = draft.near_multiple(draft.base_block, 5) if chooser.flag(0.8) else chooser.integer(0, 2)
        request.loads_later = "async_loads" in on and chooser.flag(0.6)
    return request


def _choose_prompt(draft: Draft, request_index: int) -> tuple[Span, ...]:
    """A fresh prompt, or one that shares tokens with an earlier one in one of PROMPT_FORMS' ways."""
    if draft.requests and "sharing" in draft.on and draft.chooser.flag(0.8):
        earlier_index = draft.chooser.integer(0, len(draft.requests) - 1)
        form = draft.chooser.one_of(PROMPT_FORMS)
        prompt = form(draft, earlier_index, f"s{request_index}")
        if 0 < sum(span.count for span in prompt) <= MAX_PROMPT_TOKENS:
            return prompt
    return (Span(f"s{request_index}", 0, _prompt_length(draft)),)


def _prompt_length(draft: Draft) -> int:
    most = max(1, MAX_PROMPT_TOKENS // (2 * draft.base_block * draft.dcp))  # floor: a full block count that leaves room
    unit = draft.base_block * draft.dcp
    return min(draft.near_multiple(unit, min(most, 6)), MAX_PROMPT_TOKENS)


def _replay(draft: Draft, earlier_index: int, stream: str) -> tuple[Span, ...]:
    """The same prompt again."""
    return draft.requests[earlier_index].prompt


def _fork(draft: Draft, earlier_index: int, stream: str) -> tuple[Span, ...]:
    """The same start, cut near a block boundary, and a tail of its own."""
    earlier = draft.requests[earlier_index].prompt
    shared = _cut(earlier, draft.near_multiple(draft.base_block, 6))
    return (*shared, Span(stream, 0, draft.near_multiple(draft.base_block, 2)))


def _shorten(draft: Draft, earlier_index: int, stream: str) -> tuple[Span, ...]:
    """A part of it."""
    return _cut(draft.requests[earlier_index].prompt, draft.near_multiple(draft.base_block, 6))


def _extend(draft: Draft, earlier_index: int, stream: str) -> tuple[Span, ...]:
    """All of it and some tokens more."""
    earlier = draft.requests[earlier_index].prompt
    return (*earlier, Span(stream, 0, draft.near_multiple(draft.base_block, 2)))


def _follow_up(draft: Draft, earlier_index: int, stream: str) -> tuple[Span, ...]:
    """The next turn of a conversation: its prompt, what it answered, and a new question."""
    earlier = draft.requests[earlier_index]
    answer = Span(f"{request_id(earlier_index)}.out", 0, draft.chooser.integer(1, earlier.max_tokens))
    return (*earlier.prompt, answer, Span(stream, 0, draft.chooser.integer(1, draft.base_block + 1)))


PROMPT_FORMS = (_replay, _fork, _shorten, _extend, _follow_up)


def request_id(request_index: int) -> str:
    """A, B, C, ..."""
    return chr(ord("A") + request_index)


def _cut(prompt: tuple[Span, ...], num_tokens: int) -> tuple[Span, ...]:
    """The first tokens of a prompt."""
    spans: list[Span] = []
    for span in prompt:
        if num_tokens <= 0:
            break
        spans.append(span._replace(count=min(span.count, num_tokens)))
        num_tokens -= span.count
    return tuple(spans)
