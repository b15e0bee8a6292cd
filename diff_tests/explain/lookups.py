"""Why each lookup in the prefix cache ended where it did.

The model's own lookup is asked again, over the keys that the history shows: what each group would have hit alone, how
the groups agreed, and which key was the first that a longer hit would have needed. What became of that key is told from
the history. So the rules are those of the release, and the keys those that were really there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Literal, NamedTuple

from msgspec.structs import replace

from diff_tests.explain.words import names
from oracle.content import Prefixes
from oracle.findings import token_range
from sim.coordinator import LookupSet
from sim.groups.base import GroupManager, ceil_div, floor_to
from sim.groups.sliding_window import SlidingWindowManager
from sim.manager import KVCacheManager
from sim.pool import PredictedError
from sim.releases import Rules
from sim.request import Request
from sim.scenario import Add, Mamba, Scenario, ScenarioError, SlidingWindowMLA, Tokens


class Link(NamedTuple):
    """One link of the prefix cache: the key of the first `num_tokens` tokens of an `add`, in a group, and its block."""

    group: int
    request_index: int
    num_tokens: int
    block: int


FateKind = Literal["evicted", "reset", "replaced", "salt", "never_stored", "not_kept", "partial", "not_yet", "limit"]


class Fate(NamedTuple):
    """What became of a key. evicted: its block was taken by `request`; reset: the cache was; replaced: the block got
    another key. never_stored: nobody had these tokens; salt: only with another salt or adapter; not_kept: computed, but
    the group does not register such blocks; partial: its block was never full; not_yet: it was still being computed.
    limit: the lookup does not look so far."""

    kind: FateKind
    step: int | None = None
    request: str | None = None
    block: int | None = None
    words: str = ""


class GroupLookup(NamedTuple):
    """One group's part. alone: the hit without the other groups, in tokens. missing: tokens of the prefix whose key a
    longer hit needs first. words: all that as a sentence."""

    group: int
    alone: int
    missing: int | None
    position: int | None
    fate: Fate
    words: str
    limits: bool


class Lookup(NamedTuple):
    """A lookup. limit: the longest hit it may give. hit: what was granted. found: what the release's rules give; None
    where it was not asked for."""

    request: str
    step: int
    num_tokens: int
    limit: int
    hit: int
    found: int | None
    groups: list[GroupLookup]
    words: str


class _Progress(NamedTuple):
    """How far an `add` has come: tokens computed at most, in the step of the last ones."""

    num_computed: int
    step: int


class Lookups:
    """The requests as the prefix cache sees them, and the fates of keys. Fed in the order of the history."""

    def __init__(self, scenario: Scenario, rules: Rules) -> None:
        self._scenario = scenario
        self._tokens = Tokens(scenario)
        self._adds = [step for step in scenario.steps if isinstance(step, Add)]
        self._prefixes = Prefixes(scenario)
        self._bare_prefixes = Prefixes(_without_salts(scenario))
        self._lives: dict[str, deque[int]] = {}
        for index, add in enumerate(self._adds):
            self._lives.setdefault(add.id, deque()).append(index)
        self._requests: dict[int, Request] = {}
        self._progress: dict[int, _Progress] = {}
        self._ended: set[int] = set()
        self._fates: dict[int, Fate] = {}
        self._linked: set[Link] = set()
        try:
            self._kv: KVCacheManager | None = KVCacheManager(scenario, rules)
        except ScenarioError:  # a kind of group that the model does not know
            self._kv = None

    # -- what happens --------------------------------------------------------------------------------------------------

    def add_outputs(self, new_tokens: dict[str, int]) -> None:
        """Requests gained tokens."""
        for request_id, count in new_tokens.items():
            request = self._request(request_id)
            for _ in range(count if request is not None else 0):
                assert request is not None
                request.tokens.append(self._tokens.output(request_id, request.num_outputs))

    def end(self, request_id: str) -> None:
        """The request is gone; its ID may come again."""
        lives = self._lives.get(request_id)
        if lives:
            self._ended.add(lives.popleft())

    def computed(self, request_id: str, num_computed: int, step: int) -> None:
        """The request has so many right tokens in its blocks."""
        index = self._index(request_id)
        if index is not None and num_computed > self._progress.get(index, _Progress(0, 0)).num_computed:
            self._progress[index] = _Progress(num_computed, step)

    def lost(self, link: Link, fate: Fate) -> None:
        """A link is gone."""
        key = self._key(link)
        if key is not None:
            self._fates[key] = fate

    # -- lookups -------------------------------------------------------------------------------------------------------

    def explain(self, request_id: str, step: int, links: set[Link], hit: int) -> Lookup | None:
        """A lookup of a request over these links, whose granted hit was `hit`; None where the model cannot tell."""
        request, kv = self._request(request_id), self._kv
        if request is None or kv is None:
            return None
        limit = len(request.tokens) - 1
        if not kv.caching or request.skips_cache:
            why = "it does not read the prefix cache" if kv.caching else "prefix caching is off"
            return Lookup(request_id, step, limit + 1, limit, hit, None, [], f"nothing is looked up: {why}")
        kv.extend_prefixes(request)
        self._link(links)
        calls: list[tuple[LookupSet, int]] = []
        try:
            found = self._find_watched(request, limit, calls)
            groups = [part for lookup_set in kv.coordinator.lookup_sets for part in self._parts(request, lookup_set, limit)]
        except PredictedError as error:
            return Lookup(request_id, step, limit + 1, limit, hit, None, [], f"vLLM has no such lookup: {error}")
        limiting = self._limiting(calls, found, groups)
        groups = sorted(part._replace(limits=part.group in limiting) for part in groups)
        return Lookup(request_id, step, limit + 1, limit, hit, found, groups, self._sentence(hit, found, limit, groups))

    def _link(self, links: set[Link]) -> None:
        """Makes these the links of the model's pool, of which no block is ever taken here."""
        assert self._kv is not None
        stale = {link.block for link in self._linked - links}
        for block in stale:
            self._kv.pool.drop_keys(block)
        new = links - self._linked
        if stale:
            new.update(link for link in links if link.block in stale)
        for link in new:
            key = self._key(link)
            if key is not None:
                self._kv.pool.link(key, link.block, link.num_tokens)
        self._linked = links

    def _find_watched(self, request: Request, limit: int, calls: list[tuple[LookupSet, int]]) -> int:
        """The joint lookup, with the result of every group's turn."""
        assert self._kv is not None
        coordinator = self._kv.coordinator
        sets = coordinator.lookup_sets
        watched = [_Watched(lookup_set, calls) for lookup_set in sets]
        coordinator.lookup_sets = list(watched)
        try:
            return coordinator.find_hits(request, limit).num_tokens
        finally:
            coordinator.lookup_sets = sets

    def _limiting(self, calls: list[tuple[LookupSet, int]], found: int, groups: Sequence[GroupLookup]) -> set[int]:
        """The groups that hold the hit back: those that have no more of their own, else the one whose turn brought the
        hit down to what it is."""
        if all(part.fate.kind == "limit" for part in groups):
            return set()
        short = {part.group for part in groups if part.alone <= found and part.fate.kind != "limit"}
        if short:
            return short
        return next(({member.index for member in called.members} for called, length in calls if length <= found), set())

    def _parts(self, request: Request, lookup_set: LookupSet, limit: int) -> list[GroupLookup]:
        _, alone = lookup_set.find(request, limit, lookup_set.drops_last_block)
        return [self._part(request, member, lookup_set, alone, limit) for member in lookup_set.members]

    def _part(self, request: Request, member: GroupManager, lookup_set: LookupSet, alone: int, limit: int) -> GroupLookup:
        """What the next longer hit would have needed of one group."""
        drop = "; EAGLE drops the last block of the hit" if lookup_set.drops_last_block and alone else ""
        needed = self._needed(request, member, alone, limit, lookup_set.drops_last_block)
        if needed is None:
            fate = Fate("limit", words=f"as far as a hit may go: {self._why_limit(member, limit - alone)}{drop}")
            return GroupLookup(member.index, alone, None, None, fate, fate.words, False)
        missing = self._first_missing(request, lookup_set, needed)
        if missing is None:
            fate = Fate("limit", words="a longer hit would not end at an aligned length")
            return GroupLookup(member.index, alone, None, None, fate, fate.words + drop, False)
        position = ceil_div(missing, member.block_size) - 1
        fate = self._fate(request, member, missing)
        start = position * member.block_size
        what = f"the state after {missing} tokens" if isinstance(member.group, Mamba) else token_range(start, missing)
        words = f"position {position} ({what}) is missing: {fate.words}{drop}"
        return GroupLookup(member.index, alone, missing, position, fate, words, False)

    def _why_limit(self, member: GroupManager, num_left: int) -> str:
        assert self._kv is not None
        unit = self._kv.setting.hit_alignment
        if num_left < unit:
            left = f", and the {num_left} before it fill no block of {unit}" if num_left else ""
            return f"the last token is always computed anew{left}"
        return f"no keys beyond, for blocks of {member.block_size} tokens"

    def _needed(self, request: Request, member: GroupManager, alone: int, limit: int, drop: bool) -> list[int] | None:
        """Prefix lengths whose keys the next longer hit needs, in order; None where the lookup looks no further."""
        assert self._kv is not None
        size, alignment = member.block_size, self._kv.setting.hit_alignment
        limit = min(limit, member.num_hashed(request))
        if member.full_like:
            ends = list(range(size, limit + 1, size))
            if alignment < size and limit % size >= alignment:
                ends.append(floor_to(limit, alignment))  # a hit may end inside the last block
            return ends if ends and ends[-1] > alone else None
        target = alone + (alignment if not isinstance(member.group, Mamba) else min(alignment, size))
        target = -(-target // alignment) * alignment  # rounds up to an aligned length
        if target + (size if drop else 0) > limit:
            return None
        if isinstance(member.group, Mamba):
            return [target]
        start = max(0, target - member.window + 1) if isinstance(member, SlidingWindowManager) else alone
        end = target + (size if drop else 0)
        return list(range(floor_to(start, size) + size, end + 1, size))

    def _first_missing(self, request: Request, lookup_set: LookupSet, needed: Sequence[int]) -> int | None:
        assert self._kv is not None
        for num_tokens in needed:
            keys = [member.key(request, num_tokens) for member in lookup_set.members]
            if self._kv.pool.lookup_all(keys) is None:
                return num_tokens
        return None

    # -- fates ---------------------------------------------------------------------------------------------------------

    def _fate(self, request: Request, member: GroupManager, num_tokens: int) -> Fate:
        """What became of the key of the request's first `num_tokens` tokens."""
        fate = self._fates.get(member.key(request, num_tokens))
        if fate is not None:
            return fate._replace(words=_lost_words(fate))
        num_covered = num_tokens + member.setting.hash_lookahead
        producers = [i for i in self._progress if i != request.index and self._common(i, request.index) >= num_covered]
        if not producers:
            fate = self._foreign(request, num_covered)
            ahead = f"; with lookahead a key covers {num_covered} tokens" if num_covered > num_tokens else ""
            return fate._replace(words=fate.words + ahead)
        best = max(producers, key=lambda index: self._progress[index].num_computed)
        name, progress = self._adds[best].id, self._progress[best]
        if progress.num_computed < num_tokens:
            if best not in self._ended:
                return Fate("not_yet", request=name, words=f"{name} has computed {progress.num_computed} tokens so far")
            words = f"never full: {name} ended with {progress.num_computed} tokens computed"
            return Fate("partial", request=name, words=words)
        return Fate("not_kept", progress.step, name, words=f"{name} computed it, but {_why_not_kept(member)}")

    def _foreign(self, request: Request, num_tokens: int) -> Fate:
        """Nobody had this prefix. Perhaps somebody had the same tokens under another salt or adapter."""
        for index in self._progress:
            if index != request.index and self._bare_prefixes.common(index, request.index) >= num_tokens:
                other, own = self._adds[index], self._adds[request.index]
                field = "salt" if other.salt != own.salt else "lora"
                theirs, mine = getattr(other, field), getattr(own, field)
                what = "cache salt" if field == "salt" else "LoRA adapter"
                words = f"{other.id} has these tokens, but with {what} {theirs!r} instead of {mine!r}"
                return Fate("salt", request=other.id, words=words)
        lengths = {i: self._common(i, request.index) for i in self._progress if i != request.index}
        longest = max(lengths, key=lambda index: lengths[index], default=None)
        words = "never stored: no request before has these tokens"
        if longest is not None and lengths[longest]:
            words += f" ({self._adds[longest].id} shares the first {lengths[longest]})"
        return Fate("never_stored", words=words)

    def _sentence(self, hit: int, found: int, limit: int, groups: Sequence[GroupLookup]) -> str:
        words = f"{hit} of {limit + 1} tokens are hit"
        limiting = [part.group for part in groups if part.limits]
        if found != hit:
            words += f" (the lookup alone gives {found}{self._why_less(hit, found)})"
        if len(groups) > 1 and len(limiting) == len(groups):
            words += "; no group has more"
        elif limiting and len(groups) > 1:
            several = len(limiting) > 1
            words += f"; group{'s' if several else ''} {names(list(map(str, limiting)))} limit{'' if several else 's'} it"
        return words

    def _why_less(self, hit: int, found: int) -> str:
        """Why less is granted than is found."""
        windows = [g.window for g in self._scenario.groups if isinstance(g, SlidingWindowMLA) and g.bounded_replay]
        if hit == 0 and found <= max(windows, default=0):
            return f", but the {max(windows)} tokens before the end of a hit are computed anew: there would be none left"
        if hit < found and self._scenario.connector is not None:
            return ", cut back to whole blocks as external tokens follow"
        return ""

    # -- requests ------------------------------------------------------------------------------------------------------

    def _index(self, request_id: str) -> int | None:
        lives = self._lives.get(request_id)
        return lives[0] if lives else None

    def _request(self, request_id: str) -> Request | None:
        index = self._index(request_id)
        return None if index is None else self._request_of(index)

    def _request_of(self, index: int) -> Request:
        if index not in self._requests:
            add = self._adds[index]
            self._requests[index] = Request(add, index, self._tokens.prompt(add), len(self._scenario.groups))
        return self._requests[index]

    def _key(self, link: Link) -> int | None:
        """The model's key of a link; None for one that no request of the scenario has had."""
        if self._kv is None or not 0 <= link.request_index < len(self._adds):
            return None
        request = self._request_of(link.request_index)
        self._kv.extend_prefixes(request)
        group = self._kv.groups[link.group]
        return group.key(request, link.num_tokens) if link.num_tokens <= group.num_hashed(request) else None

    def _common(self, one: int, other: int) -> int:
        return self._prefixes.common(one, other)


class _Watched(LookupSet):
    """A lookup set that notes what each of its turns found."""

    def __init__(self, watched: LookupSet, calls: list[tuple[LookupSet, int]]) -> None:
        super().__init__(watched.members, watched.drops_last_block)
        self._calls = calls

    def find(self, request: Request, max_tokens: int, drop_last: bool) -> tuple[list[list[int]], int]:
        blocks, length = super().find(request, max_tokens, drop_last)
        self._calls.append((self, length))
        return blocks, length


def _without_salts(scenario: Scenario) -> Scenario:
    steps = tuple(replace(step, salt=None, lora=None) if isinstance(step, Add) else step for step in scenario.steps)
    return replace(scenario, steps=steps)


def _lost_words(fate: Fate) -> str:
    if fate.kind == "evicted":
        return f"evicted in step {fate.step}: {fate.request} took block {fate.block}"
    if fate.kind == "reset":
        return f"forgotten by the reset after step {fate.step}"
    return f"block {fate.block} got another key in step {fate.step}"


def _why_not_kept(member: GroupManager) -> str:
    setting = member.setting
    is_sparse = isinstance(member, SlidingWindowManager) or isinstance(member.group, Mamba)
    if setting.retention_interval is not None and is_sparse:
        kind = "states" if isinstance(member.group, Mamba) else "blocks"
        return f"only {kind} where a prompt may be resumed are kept (retention_interval {setting.retention_interval})"
    if member.block_size < setting.scheduler_block_size:
        return f"only whole scheduler blocks of {setting.scheduler_block_size} tokens are registered"
    return "it was not registered"
