"""The KV cache groups of a case: which kinds, in which order, with which sizes and element types."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from msgspec.structs import replace

from diff_tests.generate.draft import Draft
from sim.geometry import pages_are_dense
from sim.scenario import (
    MLA,
    RSWA,
    AnyGroup,
    ChunkedLocal,
    Circular,
    Cross,
    Full,
    Layers,
    Mamba,
    SlidingWindow,
    SlidingWindowMLA,
)


@dataclass(frozen=True)
class Kind:
    """How the generator makes one kind of group.

    make: the group, given its block size in tokens; skipped: how many leading tokens such a group no longer needs once
    `num_computed` tokens are computed; caches: it takes part in prefix caching; fits: whether the rest of the draft allows
    for it; dcp: when decode context parallelism takes it in releases where a group does not say itself whether it is
    sharded.
    """

    make: Callable[[Draft, int], AnyGroup]
    skipped: Callable[[Any, int], int] = lambda group, num_computed: 0
    caches: bool = True
    fits: Callable[[Draft], bool] = lambda draft: True
    dcp: Literal["always", "beside others", "uncached", "never"] = "never"


def _make_full(draft: Draft, block: int) -> AnyGroup:
    sharded = False if draft.dcp > 1 and "dcp_replicated" in draft.on and draft.chooser.flag(0.5) else None
    return Full(block=block, dcp_sharded=sharded)


def _make_mla(draft: Draft, block: int) -> AnyGroup:
    return MLA(block=block)


def _choose_window(draft: Draft, block: int) -> int:
    return max(1, draft.near_multiple(block, 4)) if draft.chooser.flag(0.8) else draft.chooser.integer(1, 3)


def _make_sliding_window(draft: Draft, block: int) -> AnyGroup:
    return SlidingWindow(block=block, window=_choose_window(draft, block))


def _make_sliding_window_mla(draft: Draft, block: int) -> AnyGroup:
    return SlidingWindowMLA(block=block, window=_choose_window(draft, block))


def _make_replayed_window(draft: Draft, block: int) -> AnyGroup:
    return SlidingWindowMLA(block=block, window=draft.replayed_window, bounded_replay=True)


def _make_rswa(draft: Draft, block: int) -> AnyGroup:
    return RSWA(block=block, window=_choose_window(draft, block))


def _make_chunked_local(draft: Draft, block: int) -> AnyGroup:
    chunk = block * draft.chooser.integer(1, 4)
    return ChunkedLocal(block=block, chunk=chunk + 1 if draft.chooser.flag(0.04) else chunk)


def _make_circular(draft: Draft, block: int) -> AnyGroup:
    return Circular(block=block)


def _make_cross(draft: Draft, block: int) -> AnyGroup:
    return Cross(block=block)


def _make_plain_mamba(draft: Draft, block: int) -> AnyGroup:
    """Its block is one request's whole length, as vLLM plans it; the direct driver may show it shorter blocks, so that the
    state block comes after null ones."""
    size = block if "direct" in draft.on else draft.max_model_len
    return Mamba(block=size, speculative_blocks=draft.num_drafted)


def _make_mamba_align(draft: Draft, block: int) -> AnyGroup:
    """It works in the smallest block of all groups."""
    checkpoints: dict[str, Any] = {}
    if "checkpoints" in draft.on and draft.chooser.flag(0.9):
        checkpoints = {"checkpoint_blocks": 1, "checkpoint_alignment": draft.chooser.one_of((1, 1, 2, draft.base_block))}
    return Mamba(block=draft.base_block, mode="align", speculative_blocks=draft.num_drafted, **checkpoints)


def _make_mamba_all(draft: Draft, block: int) -> AnyGroup:
    return Mamba(block=block, mode="all", speculative_blocks=draft.num_drafted)


def _outside_window(group: Any, num_computed: int) -> int:
    return max(0, num_computed - group.window + 1)  # type: ignore[no-any-return]


def _uses_eagle(draft: Draft) -> bool:
    return draft.speculative is not None and draft.speculative.method == "eagle"


KINDS: dict[str, Kind] = {
    "full": Kind(make=_make_full, dcp="always"),
    "sliding_window": Kind(make=_make_sliding_window, skipped=_outside_window),
    "mla": Kind(make=_make_mla, dcp="always"),
    "mamba align": Kind(make=_make_mamba_align, skipped=lambda group, x: x - 1, dcp="beside others"),
    "mamba none": Kind(make=_make_plain_mamba, skipped=lambda group, x: x - 1, caches=False, dcp="uncached"),
    "mamba all": Kind(
        make=_make_mamba_all,
        skipped=lambda group, x: x - 1,
        fits=lambda draft: draft.rules.mamba_mode_all_exists and draft.dcp == 1,
    ),
    "chunked_local": Kind(
        make=_make_chunked_local,
        skipped=lambda group, x: x - x % group.chunk,
        fits=lambda draft: not _uses_eagle(draft) or draft.chooser.flag(0.1),  # its lookup refuses to drop a block
    ),
    "rswa": Kind(make=_make_rswa, dcp="always"),
    "sliding_window_mla": Kind(make=_make_sliding_window_mla, skipped=_outside_window),
    "sliding_window_mla replayed": Kind(
        make=_make_replayed_window,
        skipped=_outside_window,
        fits=lambda draft: draft.rules.bounded_replay_exists,
    ),
    "circular": Kind(make=_make_circular),
    "cross": Kind(make=_make_cross, caches=False, fits=lambda draft: {"encoder", "several_groups"} <= draft.on),
}
"""By label: the kind, and what tells groups of one kind apart that behave differently."""

_MAMBA = ("mamba none", "mamba align", "mamba all")
_UNCACHED = ("circular", "sliding_window_mla replayed")
"""Kinds that stay out of the prefix cache while other groups use it."""
_SPECULATORS = (Full, MLA, SlidingWindow)
"""Kinds of layers that a speculator has."""


def label(group: AnyGroup) -> str:
    """The key in KINDS of what such a group is."""
    if isinstance(group, Mamba):
        return f"mamba {group.mode}"
    if isinstance(group, SlidingWindowMLA) and group.bounded_replay:
        return "sliding_window_mla replayed"
    return group.kind


def choose_kinds(draft: Draft) -> list[str]:
    """Labels of the groups in order: often of one kind or of two, each pair as likely as another, else any mix. What the
    release cannot combine stays out."""
    chooser = draft.chooser
    candidates = [name for name, kind in KINDS.items() if _kind_fits(draft, kind)]
    if "several_groups" not in draft.on:
        return [chooser.one_of(candidates)]
    num_groups = chooser.one_of((2, 2, 3, 4))
    if chooser.flag(0.6):
        pair = [chooser.one_of(candidates), chooser.one_of(candidates)]
        kinds = pair + [chooser.one_of(pair) for _ in range(num_groups - 2)]
    else:
        kinds = [chooser.one_of(candidates) for _ in range(num_groups)]
    return _combinable(draft, kinds)


def _kind_fits(draft: Draft, kind: Kind) -> bool:
    if "no_prefix_caching" in draft.on and kind.make in (_make_mamba_align, _make_mamba_all, _make_replayed_window):
        return False  # vLLM's start-up code chooses them for the sake of the prefix cache
    if draft.dcp > 1 and not draft.rules.dcp_sharded_flag and not _dcp_takes(draft, kind):
        return False
    return kind.fits(draft)


def _dcp_takes(draft: Draft, kind: Kind) -> bool:
    if "no_prefix_caching" in draft.on or not kind.caches:
        return kind.dcp != "never"
    return kind.dcp == "always" or (kind.dcp == "beside others" and "several_groups" in draft.on)


def _combinable(draft: Draft, kinds: list[str]) -> list[str]:
    """The kinds, less what cannot stand beside the others."""
    mamba = next((name for name in kinds if name in _MAMBA), None)
    kinds = [mamba if mamba and name in _MAMBA else name for name in kinds]  # one mode per engine
    if mamba != "mamba none" and "no_prefix_caching" not in draft.on and all(name in _UNCACHED for name in kinds):
        kinds[0] = "full"
    if all(name == "cross" for name in kinds):
        kinds[draft.chooser.integer(0, len(kinds) - 1)] = "full"
    if draft.dcp > 1 and any(KINDS[name].dcp == "always" for name in kinds):
        # Their blocks cover more tokens each, and lookups of chunks take groups of one block size only.
        kinds = ["full" if name == "chunked_local" else name for name in kinds]
    return kinds


def make_groups(draft: Draft, kinds: Sequence[str]) -> tuple[AnyGroup, ...]:
    """The groups of these kinds, in order."""
    groups: list[AnyGroup] = []
    dtypes = _choose_dtypes(draft)
    # Lookups of chunked local attention, and of states that are all kept, take groups of one block size only.
    mixed = "mixed_blocks" in draft.on and not {"chunked_local", "mamba all"} & set(kinds)
    draft.replayed_window = _choose_window(draft, draft.base_block)
    for name in kinds:
        factor = draft.chooser.one_of((1, 2, 1, 3, 4)) if mixed else 1
        group = KINDS[name].make(draft, draft.base_block * factor)
        settings: dict[str, Any] = {}
        if "layers" in draft.on:
            settings["layers"] = draft.chooser.integer(1, 3)
        if "uniform" in draft.on and not isinstance(group, (Mamba, Cross)) and draft.chooser.flag(0.6):
            settings["uniform"] = tuple(_choose_layers(draft) for _ in range(draft.chooser.one_of((1, 1, 2))))
        if dtypes:
            settings["dtype"] = draft.chooser.one_of(dtypes)
        groups.append(replace(group, **settings) if settings else group)
    groups = _with_draft_group(draft, groups)
    return _with_kernel_blocks(draft, tuple(groups)) if "kernel_blocks" in draft.on else tuple(groups)


def _choose_layers(draft: Draft) -> Layers:
    """Layers of a group that have pages of a size of their own."""
    chooser = draft.chooser
    return Layers(layers=chooser.integer(1, 2), heads=chooser.one_of((1, 2, 4)), head_size=chooser.one_of((32, 8, 64)))


def _with_draft_group(draft: Draft, groups: list[AnyGroup]) -> list[AnyGroup]:
    """Marks one group as the speculator's own."""
    if "draft_groups" not in draft.on or draft.speculative is None or draft.speculative.method == "ngram":
        return groups
    candidates = [index for index, group in enumerate(groups) if isinstance(group, _SPECULATORS)]
    if not candidates:
        return groups
    index = draft.chooser.one_of(candidates)
    groups[index] = replace(groups[index], draft=True)
    return groups


def _choose_dtypes(draft: Draft) -> tuple[str, ...]:
    """The element types that the groups may use; a model has one fp8 format."""
    plain = ("bfloat16", "float16", "float32")
    fp8 = draft.chooser.one_of(("fp8_e4m3", "fp8_e5m2"))
    if "mixed_dtypes" in draft.on:
        return ("bfloat16", draft.chooser.one_of(("float16", "float32", fp8)))
    if "other_dtype" in draft.on:
        return (draft.chooser.one_of((*plain[1:], fp8)),)
    return ()


def _with_kernel_blocks(draft: Draft, groups: tuple[AnyGroup, ...]) -> tuple[AnyGroup, ...]:
    """Splits blocks into smaller kernel blocks. vLLM can do so only where a block is one dense page; a state is never
    split."""
    if not pages_are_dense(groups):
        return groups
    return tuple(
        replace(group, kernel_block=draft.chooser.one_of(divisors))
        if not isinstance(group, Mamba) and (divisors := _proper_divisors(group.block))
        else group
        for group in groups
    )


def _proper_divisors(block: int) -> list[int]:
    """The three largest sizes below `block` that divide it."""
    return [size for size in range(block // 2, 0, -1) if block % size == 0][:3]  # floor: none is above half
