"""A second formulation of what is easiest to get subtly wrong, straight from the definition, token by token.

Resuming at token L: a group has the hit if every token that the token at L attends to lies in a cached block, or, for a
state-space group, if the state after L tokens is cached. Dropping after x tokens: a block may go if no token from x on
attends to any token in it. Nothing here is clever, so that it can be trusted; Hypothesis holds the model against it.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from sim.coordinator import Hits
from sim.geometry import FULL_LIKE, block_sizes, has_partial_hits, is_prefix_cacheable
from sim.history import Scheduled
from sim.manager import KVCacheManager
from sim.releases import NEWEST, rules_of
from sim.request import Request
from sim.scenario import (
    MLA,
    RSWA,
    Add,
    AnyGroup,
    ChunkedLocal,
    Circular,
    Engine,
    Full,
    Mamba,
    Run,
    Scenario,
    SlidingWindow,
    SlidingWindowMLA,
    Span,
    Tokens,
)
from sim.simulator import Simulator

RULES = rules_of(NEWEST)
NUM_BLOCKS = 600


# ------------------------------------------------------------------------------------------------------- the definition


def attends(group: AnyGroup, query: int, key: int, num_prompt: int) -> bool:
    """Whether the token at `query` looks at the token at `key`, both counted from 0."""
    if key > query:
        return False
    if isinstance(group, (SlidingWindow, SlidingWindowMLA)):
        return query - key < group.window  # the window holds the token itself
    if isinstance(group, RSWA):
        return key < num_prompt or query - key <= group.window  # the window holds what is before the token
    if isinstance(group, ChunkedLocal):
        return query // group.chunk == key // group.chunk
    return True


def tokens_needed(group: AnyGroup, resume_at: int) -> list[int]:
    """The tokens before `resume_at` that the token there looks at. Later ones look at fewer of them, or the same."""
    if isinstance(group, RSWA):  # cached like full attention: who resumes may have a longer prompt
        return list(range(resume_at))
    return [token for token in range(resume_at) if attends(group, resume_at, token, 0)]


@dataclass
class Cache:
    """What is cached of one request: per group, the prefix lengths that some block is linked to.

    A block that is linked to the prefix of P tokens holds the tokens of its position below P.
    """

    scenario: Scenario
    num_tokens: int
    lengths: list[set[int]]

    @property
    def alignment(self) -> int:
        """Hits end at its multiples."""
        scheduler_size, hash_size = block_sizes(self.scenario, RULES)
        return hash_size if has_partial_hits(self.scenario, RULES) else scheduler_size

    def sets(self) -> list[list[int]]:
        """The indexes of groups that are alike, which are matched by the same key, by set."""
        groups = self.scenario.groups
        cacheable = [i for i, group in enumerate(groups) if is_prefix_cacheable(group)]
        return [[i for i in cacheable if groups[i] == groups[j]] for j in cacheable if groups.index(groups[j]) == j]

    def has(self, members: list[int], resume_at: int, exact: bool) -> bool:
        """Whether groups that are alike have what resuming at `resume_at` needs. exact: the last block must be linked to
        that very prefix; else a longer one that ends in the block does too, as long as it can be hit itself."""
        group = self.scenario.groups[members[0]]
        common = set.intersection(*(self.lengths[member] for member in members))
        if isinstance(group, Mamba):
            return resume_at == 0 or resume_at in common
        for position in {token // group.block for token in tokens_needed(group, resume_at)}:
            whole = (position + 1) * group.block
            held = min(resume_at, whole)  # tokens of the prefix up to the end of what this block has to hold
            enough = [held] if exact else range(held, whole + 1)
            if not any(length in common and length < self.num_tokens for length in enough):
                return False
        return True

    def longest_hit(self, exact: bool = False) -> int:
        """The longest aligned prefix, the last token excluded, at which every group can resume."""
        lengths = range(0, self.num_tokens, self.alignment)
        sets = self.sets()
        return max(n for n in lengths if all(self.has(members, n, exact) for members in sets)) if sets else 0


# -------------------------------------------------------------------------------------------------------------- drawing


def _request(kv: KVCacheManager, scenario: Scenario) -> Request:
    add = scenario.steps[0]
    assert isinstance(add, Add)
    request = Request(add, 0, Tokens(scenario).prompt(add), len(scenario.groups))
    kv.extend_prefixes(request)
    return request


def _scenario(groups: list[AnyGroup], num_tokens: int, unit: int | None = None) -> Scenario:
    engine = Engine(blocks=NUM_BLOCKS, prefix_match_unit=unit, max_model_len=1024)
    return Scenario(engine=engine, groups=tuple(groups), steps=(Add(id="A", prompt=(Span("a", 0, num_tokens),)),))


def model_hit(cache: Cache, checks_blocks: bool = True) -> int:
    """The length that the model finds when exactly these prefixes are linked, each to a block of its own."""
    kv = KVCacheManager(cache.scenario, RULES)
    request = _request(kv, cache.scenario)
    for group, lengths in zip(kv.groups, cache.lengths, strict=True):
        for length in sorted(lengths):
            kv.pool.link(group.key(request, length), kv.pool.take(1)[0], length)
    hits = kv.computed_blocks(request)
    if checks_blocks:
        _assert_needed_blocks_are_there(cache, kv, request, hits)
    return hits.num_tokens


def _assert_needed_blocks_are_there(cache: Cache, kv: KVCacheManager, request: Request, hits: Hits) -> None:
    """Every block that is needed is in the table, linked to a prefix of the request that ends in this block."""
    for group, blocks, lengths in zip(kv.groups, hits.blocks, cache.lengths, strict=True):
        if not group.prefix_cacheable or hits.num_tokens == 0:
            continue
        needed = tokens_needed(group.group, hits.num_tokens)
        if isinstance(group.group, Mamba):
            needed = [hits.num_tokens - 1]  # where the state lies
        for position in {token // group.block_size for token in needed}:
            first, whole = position * group.block_size, (position + 1) * group.block_size
            holders = [kv.pool.holders(group.key(request, n)) for n in sorted(lengths) if first < n <= whole]
            assert [blocks[position]] in holders


@st.composite
def caches(draw: st.DrawFn, whole_blocks: bool) -> Cache:
    """Groups of all cacheable kinds, and any set of cached prefixes. whole_blocks: hits end at whole blocks."""
    size = draw(st.sampled_from([2, 4]))
    kinds = draw(st.lists(st.sampled_from(KINDS if whole_blocks else PARTIAL_KINDS), min_size=1, max_size=4))
    assume(whole_blocks or ("mamba" in kinds and len(kinds) > 1))
    unit = None if whole_blocks else size // 2  # exact: sizes are even
    groups = [_draw_group(draw, kind, _draw_block(draw, kind, kinds, size, unit)) for kind in kinds]
    num_tokens = draw(st.integers(1, 12 * size))
    scenario = _scenario(groups, num_tokens, unit)
    hash_size = block_sizes(scenario, RULES)[1]
    lengths = [set(_draw_lengths(draw, group, num_tokens, hash_size)) for group in groups]
    return Cache(scenario, num_tokens, lengths)


def _draw_block(draw: st.DrawFn, kind: str, kinds: list[str], size: int, unit: int | None) -> int:
    """With hits inside blocks, windows have blocks of one hash unit; chunks refuse neighbours of another size."""
    if unit is not None:
        return unit if kind == "sliding_window" else size
    return size if "chunked_local" in kinds else size * draw(st.sampled_from([1, 1, 2]))


KINDS = ("full", "mla", "rswa", "sliding_window", "sliding_window_mla", "chunked_local", "mamba", "circular")
PARTIAL_KINDS = ("full", "mla", "rswa", "sliding_window", "mamba", "mamba")


def _draw_group(draw: st.DrawFn, kind: str, block: int) -> AnyGroup:
    window = draw(st.integers(2, 3 * block))
    match kind:
        case "full":
            return Full(block=block)
        case "mla":
            return MLA(block=block)
        case "rswa":
            return RSWA(block=block, window=window)
        case "sliding_window":
            return SlidingWindow(block=block, window=window)
        case "sliding_window_mla":
            return SlidingWindowMLA(block=block, window=window)
        case "chunked_local":
            return ChunkedLocal(block=block, chunk=block * draw(st.integers(1, 4)))
        case "mamba":
            return Mamba(block=block, mode="align")
        case _:
            return Circular(block=block)


def _draw_lengths(draw: st.DrawFn, group: AnyGroup, num_tokens: int, hash_size: int) -> list[int]:
    """Mostly cached or mostly not; a block of any kind may miss, as after an eviction."""
    if not is_prefix_cacheable(group):
        return []
    finds_partial = isinstance(group, (*FULL_LIKE, Mamba))
    step = hash_size if finds_partial else group.block
    possible = range(step, num_tokens + 1, step)
    missing = draw(st.sets(st.sampled_from(possible), max_size=4)) if possible else set()
    return [n for n in possible if n not in missing] if draw(st.booleans()) else sorted(missing)


# --------------------------------------------------------------------------------------------------------- joint lookup


def _assert_matches_the_definition(cache: Cache) -> None:
    """Equal, with one exception by design. Full-like groups of different specifications are looked up one after another,
    each only under the length that the one before left. Where hits may end inside blocks, a block that is linked to a
    longer prefix than that is not seen, though it holds the tokens. The hit then lies between the definition that only
    takes blocks linked to the very prefix, and the one that takes any block holding its tokens."""
    found = model_hit(cache)
    num_full = sum(isinstance(cache.scenario.groups[members[0]], FULL_LIKE) for members in cache.sets())
    if num_full > 1 and has_partial_hits(cache.scenario, RULES):
        assert cache.longest_hit(exact=True) <= found <= cache.longest_hit()
    else:
        assert found == cache.longest_hit()


@settings(max_examples=300, deadline=None)
@given(caches(whole_blocks=True))
def test_the_joint_hit_is_the_longest_at_which_every_group_can_resume(cache: Cache) -> None:
    _assert_matches_the_definition(cache)


@settings(max_examples=300, deadline=None)
@given(caches(whole_blocks=False))
def test_so_it_is_where_hits_may_end_inside_blocks(cache: Cache) -> None:
    _assert_matches_the_definition(cache)


def test_a_second_full_group_does_not_see_keys_beyond_what_the_first_left() -> None:
    groups: list[AnyGroup] = [Full(block=4), MLA(block=4), Mamba(block=4, mode="align")]
    states = {1, 2, 3, 4}
    scenario = _scenario(groups, 5, unit=1)
    for mla_length, found in ((2, 2), (3, 0)):  # both hold the first two tokens
        cache = Cache(scenario, 5, [{2}, {mla_length}, states])
        assert model_hit(cache) == found
        assert cache.longest_hit() == 2


def test_a_window_of_one_token_needs_nothing_and_yet_is_hit_only_at_a_cached_block() -> None:
    scenario = _scenario([SlidingWindow(block=4, window=1)], 9)
    for cached, found in ((set(), 0), ({4}, 4), ({8}, 8)):
        cache = Cache(scenario, 9, [cached])
        assert model_hit(cache) == found
        assert cache.longest_hit() == 8


def test_a_chunk_that_begins_inside_a_block_is_hit_without_the_chunk_before() -> None:
    """More than the definition allows: the hit ends before the last chunk begins, where the chunk before is needed."""
    cache = Cache(_scenario([ChunkedLocal(block=4, chunk=6)], 8), 8, [set()])
    assert model_hit(cache, checks_blocks=False) == 4
    assert cache.longest_hit() == 0
    assert not cache.has([0], 4, exact=False)


# ------------------------------------------------------------------------------------------------------------- dropping


def blocks_to_drop(group: AnyGroup, num_computed: int, num_blocks: int, num_prompt: int) -> list[int]:
    """The positions whose tokens are all computed and looked at by no token from `num_computed` on."""
    horizon = num_computed + 4 * group.block + 40  # later tokens look at nothing older than these do
    return [
        position
        for position in range(num_blocks)
        if not any(
            attends(group, query, key, num_prompt)
            for key in range(position * group.block, (position + 1) * group.block)
            for query in range(num_computed, horizon)
        )
        and (position + 1) * group.block <= num_computed
    ]


@st.composite
def dropping_groups(draw: st.DrawFn) -> AnyGroup:
    block, size = draw(st.integers(1, 6)), draw(st.integers(1, 20))
    kind = draw(st.sampled_from([SlidingWindow, SlidingWindowMLA, RSWA, ChunkedLocal]))
    return ChunkedLocal(block=block, chunk=size) if kind is ChunkedLocal else kind(block=block, window=size)


@settings(max_examples=200, deadline=None)
@given(dropping_groups(), st.integers(1, 30), st.lists(st.integers(0, 60), min_size=1, max_size=4))
@example(SlidingWindow(block=4, window=5), 10, [8])
@example(ChunkedLocal(block=4, chunk=6), 10, [6, 12])
@example(RSWA(block=4, window=3), 6, [11, 15])
def test_blocks_are_dropped_that_no_later_token_looks_at(group: AnyGroup, num_prompt: int, computed: list[int]) -> None:
    scenario = _scenario([group], num_prompt)
    kv = KVCacheManager(scenario, RULES)
    request = _request(kv, scenario)
    (manager,) = kv.groups
    num_blocks = -(-max(computed) // group.block) + 2  # rounded up, and two more
    table = request.tables[0] = kv.pool.take(num_blocks)
    for num_computed in sorted(computed):
        manager.release_skipped(request, num_computed)
        dropped = [position for position, block_id in enumerate(table) if block_id == 0]
        assert dropped == blocks_to_drop(group, num_computed, num_blocks, num_prompt)
    assert kv.pool.num_free == NUM_BLOCKS - 1 - num_blocks + len(dropped)


# ------------------------------------------------------------------------------------------------------------ retention


def _hit_of_second(groups: list[AnyGroup], prompts: list[tuple[Span, ...]], interval: int | None) -> int:
    """The local hit of a second request that comes when the first has ended, nothing evicted."""
    engine = Engine(blocks=NUM_BLOCKS, retention_interval=interval, max_model_len=1024)
    first, second = (Add(id="AB"[i], prompt=prompt, max_tokens=1) for i, prompt in enumerate(prompts))
    steps = (first, Run(limit=100), second, Run(limit=100))
    history = Simulator(Scenario(engine=engine, groups=tuple(groups), steps=steps), RULES).history()
    return next(record.hits["B"] for record in history if isinstance(record, Scheduled) and "B" in record.admitted)


@st.composite
def retained_groups(draw: st.DrawFn) -> list[AnyGroup]:
    """Groups of all cacheable kinds that may stand together, some of which thin their cache out."""
    size = draw(st.sampled_from([2, 4]))
    kinds = draw(st.lists(st.sampled_from(KINDS[:-1]), min_size=1, max_size=3))
    return [_draw_group(draw, kind, _draw_block(draw, kind, kinds, size, None)) for kind in kinds]


@settings(max_examples=200, deadline=None)
@given(retained_groups(), st.integers(1, 60))
def test_what_is_kept_for_a_prompt_is_enough_for_the_same_prompt_again(groups: list[AnyGroup], num_tokens: int) -> None:
    """Straight from the purpose of sparse retention: nothing that this request could hit is left out."""
    prompts: list[tuple[Span, ...]] = [(Span("a", 0, num_tokens),)] * 2
    assert _hit_of_second(groups, prompts, 0) == _hit_of_second(groups, prompts, None)


@settings(max_examples=200, deadline=None)
@given(retained_groups(), st.integers(1, 60), st.integers(1, 60), st.integers(1, 3))
@example([Full(block=2), Mamba(block=2, mode="align"), Full(block=4)], 36, 36, 2)  # no step ends at 32: no state there
@example([Full(block=2), Mamba(block=2, mode="align"), Full(block=4)], 32, 32, 2)  # one does
def test_an_interval_keeps_what_resuming_at_its_multiples_needs(
    groups: list[AnyGroup], num_tokens: int, num_shared: int, num_units: int
) -> None:
    """A multiple at which the whole cache lets a request resume, the thinned one does as well."""
    scenario = _scenario(groups, num_tokens)
    interval = block_sizes(scenario, RULES)[0] * num_units
    assume(any(isinstance(group, (SlidingWindow, Mamba)) for group in groups))

    def hit(num_shared: int, kept: int | None) -> int:
        prompts = [(Span("a", 0, num_tokens),), (Span("a", 0, num_shared), Span("b", 0, 3))]
        return _hit_of_second(groups, prompts, kept)

    num_shared = min(num_shared, num_tokens)
    dense, thinned = hit(num_shared, None), hit(num_shared, interval)
    last_multiple = dense // interval * interval  # floor: at or below what was there
    multiples = range(last_multiple, 0, -interval)
    assert next((multiple for multiple in multiples if hit(multiple, None) == multiple), 0) <= thinned <= dense
    if not any(isinstance(group, Mamba) for group in groups):  # only states are missing inside a step
        assert last_multiple <= thinned
