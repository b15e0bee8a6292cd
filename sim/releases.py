"""What differs between vLLM releases: one named rule each. Nowhere else does the model look at a release number."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The rules of one release. The number in brackets says since when a rule holds as it is named."""

    release: str

    # -- block sizes and decode context parallelism
    dcp_sharded_flag: bool
    """[0.31] Each spec says whether decode context parallelism shards it. Before, full attention and MLA were sharded,
    and anything else was refused under it."""

    # -- scheduling
    lone_request_ignores_long_prefill_threshold: bool
    """[0.31] The long-prefill threshold is off while a single request is running or waiting."""
    lone_admission_is_padded: bool
    """[0.30] With drafts, an admission with a hit is padded to a decode step's shape even beside no other request."""
    victim_must_be_free_at_once: bool
    """[0.30] Nobody is preempted whose blocks a step in flight may still write to; the step then goes without."""
    priority_goes_on_after_self_preemption: bool
    """[0.33] With priorities, a request that had to preempt itself does not stop the requests after it."""
    head_without_encoder_room_is_passed_over: bool
    """[0.33] A waiting request whose encoder input does not fit the step lets those behind it go first."""
    skipping_the_cache_skips_the_connector: bool
    """[0.31] A request that does not read the prefix cache gets no external tokens either."""

    holders_have_own_queue: bool
    """[0.31] Waiting requests that hold blocks have a queue of their own, which goes first. Before, whoever was passed
    over went to the front of a queue of the skipped."""
    blocks_reserved_for_drafts: bool
    """[0.31] An asynchronous load is admitted only if its next step's drafts would fit too."""
    reservation_is_per_group: bool
    """[0.32] Those blocks are counted group by group, before by the scheduler's block size."""
    loads_skip_zeroing_by_range: bool
    """[up to 0.31] No block in an asynchronous load's range of tokens is zeroed; since, none taken for external tokens."""
    loads_fail_by_request: bool
    """[0.30] With several groups a worker reports which requests' loads failed. Before, it could only report blocks, which
    vLLM does not find in several groups."""
    loads_may_restore_windows: bool
    """[0.32] A load may bring the last window of a group with bounded replay."""
    prefill_cadence_is_local: bool
    """[0.33] `prefill_schedule_interval` holds without data parallelism too."""
    holders_run_while_new_are_paused: bool
    """[0.32] While new requests are paused, waiting ones that hold blocks go on."""

    # -- what is registered in the prefix cache
    prompt_tail_excludes_last_token: bool
    """[0.32] The partial key of a prompt's tail ends at the last hash boundary at or below P - 1 tokens, before at or
    below P; it matters where P is a multiple of the hash block size."""
    trimmed_outputs_count_as_not_computed: bool
    """[0.33] Outputs cut off by the end of a request are taken back from its computed tokens, and with drafts the update
    of a synchronous engine registers blocks too."""
    eagle_resumes_at_two_boundaries: bool
    """[0.30] With EAGLE, sparse retention keeps what both of the prompt's last two block ends need."""
    eagle_keeps_block_before_shared_prefix_end: bool
    """[0.33] With EAGLE, the block before the end of a shared prefix is kept too."""
    dropped_block_may_be_the_last: bool
    """[0.32] The block that EAGLE drops may end behind the last token that can be hit, up to the hashed length."""
    marked_groups_drop_only_with_eagle: bool
    """[0.33] Groups marked as a speculator's drop the last block of a hit only if the speculator is of EAGLE's kind."""
    adapter_and_salt_are_told_apart: bool
    """[0.31] A key says which of its extras is the adapter and which the salt. Before, they were a bare list, and a salt
    equal to another request's adapter name gave the same key for the first hash block."""
    hashes_look_ahead_for_eagle: bool
    """[0.33] Without a connector, keys cover the token after their prefix, and EAGLE drops no block."""

    popped_tables_lose_leading_nulls: bool
    """[0.33] Tables whose release is deferred go without their leading nulls; the free order does not depend on it."""

    # -- Mamba, mode align
    checkpoints_at_positions: bool
    """[0.30] A checkpoint inside a prefill step has a token position of its own; before, it was only one more block."""
    checkpoint_only_at_prefill_end: bool
    """[0.31] With sparse retention only the step that ends a prefill writes a checkpoint."""
    checkpoints_at_hit_alignment: bool
    """[0.32] Checkpoints lie at the alignment of hits, before at the hash block size."""
    checkpoint_drop_counts_last_token: bool
    """[0.32] With EAGLE, a checkpoint's position is counted from the last token, before from the one before it."""
    checkpoint_cap_includes_speculative: bool
    """[only 0.31] The estimate for a step with a checkpoint counts the speculative blocks again."""
    checkpoint_estimate_is_exact: bool
    """[only 0.30] The estimate for a later step with a checkpoint is what its table lacks."""
    mamba_estimate_is_capped: bool
    """[0.31] The estimated blocks are at most what a step can take, before they were set to it."""
    checkpoint_step_keeps_speculative: bool
    """[0.30 and 0.31] Speculative blocks stay where they are in a step with a checkpoint."""
    relocation_spares_checkpoint: bool
    """[0.32] Speculative blocks move behind the new state up to the checkpoint's entry."""
    keeps_prompt_checkpoint: bool
    """[0.31] The checkpoint at the prompt's end is kept under sparse retention."""
    keeps_prompt_and_interval_checkpoints: bool
    """[0.32] Checkpoints are kept at the prompt's end and where the retention interval wants a state, else dropped."""
    tail_at_checkpoint_position: bool
    """[0.32] The prompt's last cached state is where a checkpoint would be."""
    tail_drops_last_block: bool
    """[0.30 and 0.31] It is one hash block earlier with EAGLE."""
    tail_drops_with_any_group: bool
    """[0.31] It is so with EAGLE, whichever group drops its last block, before if this group does."""
    tail_may_end_a_block: bool
    """[0.32] It may lie at the end of a block."""
    tail_is_not_registered_twice: bool
    """[0.33] A block that has this very key already is left alone."""
    mamba_release_passes_nulls: bool
    """[0.30] Releasing skipped states passes over nulls instead of stopping at the first."""
    split_by_count_of_checkpoints: bool
    """[only 0.29] Steps that start at a block boundary are not cut for groups with checkpoint blocks."""

    # -- what is known, or refused
    token_budget_must_exceed_lookahead: bool
    """[0.33] A step must have room for more tokens than drafting looks ahead, before for more than the rows it adds."""
    unsplit_where_pages_differ: bool
    """[0.32] Where layers with pages of several sizes lie side by side, no block is split into kernel blocks. Before, a
    worker that had to split one refused. Backends note their kernel blocks on the specification for that, so groups that
    differ in them are looked up apart."""
    long_prefill_threshold_adapts: bool
    """[0.31] The long-prefill threshold can grow with the token budget per request."""
    bounded_replay_exists: bool
    """[0.31] Groups of sliding windows may be left out of the prefix cache and computed again."""
    mamba_mode_all_exists: bool
    """[up to 0.31] Mamba groups can keep all states, in mode `all`."""
    async_scheduling_takes_ngram: bool
    """[0.33] Asynchronous scheduling works with drafts looked up in the prompt."""
    lone_group_refuses_prefix_match_unit: bool
    """[0.32] A prefix match unit that a single group would ignore is refused."""
    mamba_prefix_caching_requires_align: bool
    """[0.33] Prefix caching of a Mamba group in another mode than `align` is refused."""

    # -- DecodeBenchConnector
    decode_bench_fills_at_startup: bool
    """[0.31] The option `startup_fill` exists; before, it was ignored."""
    decode_bench_restores_windows: bool
    """[0.33] It says that it loads every group, so nothing of a hit has to be computed again."""


_V0_33 = Rules(
    release="0.33.0",
    dcp_sharded_flag=True,
    lone_request_ignores_long_prefill_threshold=True,
    lone_admission_is_padded=True,
    victim_must_be_free_at_once=True,
    priority_goes_on_after_self_preemption=True,
    head_without_encoder_room_is_passed_over=True,
    skipping_the_cache_skips_the_connector=True,
    holders_have_own_queue=True,
    blocks_reserved_for_drafts=True,
    reservation_is_per_group=True,
    loads_skip_zeroing_by_range=False,
    loads_fail_by_request=True,
    loads_may_restore_windows=True,
    prefill_cadence_is_local=True,
    holders_run_while_new_are_paused=True,
    prompt_tail_excludes_last_token=True,
    trimmed_outputs_count_as_not_computed=True,
    eagle_resumes_at_two_boundaries=True,
    eagle_keeps_block_before_shared_prefix_end=True,
    dropped_block_may_be_the_last=True,
    marked_groups_drop_only_with_eagle=True,
    adapter_and_salt_are_told_apart=True,
    hashes_look_ahead_for_eagle=True,
    popped_tables_lose_leading_nulls=True,
    checkpoints_at_positions=True,
    checkpoint_only_at_prefill_end=True,
    checkpoints_at_hit_alignment=True,
    checkpoint_drop_counts_last_token=True,
    checkpoint_cap_includes_speculative=False,
    checkpoint_estimate_is_exact=False,
    mamba_estimate_is_capped=True,
    checkpoint_step_keeps_speculative=False,
    relocation_spares_checkpoint=True,
    keeps_prompt_checkpoint=True,
    keeps_prompt_and_interval_checkpoints=True,
    tail_at_checkpoint_position=True,
    tail_drops_last_block=True,
    tail_drops_with_any_group=True,
    tail_may_end_a_block=True,
    tail_is_not_registered_twice=True,
    mamba_release_passes_nulls=True,
    split_by_count_of_checkpoints=False,
    token_budget_must_exceed_lookahead=True,
    unsplit_where_pages_differ=True,
    long_prefill_threshold_adapts=True,
    bounded_replay_exists=True,
    mamba_mode_all_exists=False,
    async_scheduling_takes_ngram=True,
    lone_group_refuses_prefix_match_unit=True,
    mamba_prefix_caching_requires_align=True,
    decode_bench_fills_at_startup=True,
    decode_bench_restores_windows=True,
)
_V0_32 = replace(
    _V0_33,
    release="0.32.0",
    head_without_encoder_room_is_passed_over=False,
    token_budget_must_exceed_lookahead=False,
    async_scheduling_takes_ngram=False,
    prefill_cadence_is_local=False,
    mamba_prefix_caching_requires_align=False,
    decode_bench_restores_windows=False,
    priority_goes_on_after_self_preemption=False,
    trimmed_outputs_count_as_not_computed=False,
    eagle_keeps_block_before_shared_prefix_end=False,
    marked_groups_drop_only_with_eagle=False,
    hashes_look_ahead_for_eagle=False,
    popped_tables_lose_leading_nulls=False,
    tail_is_not_registered_twice=False,
)
_V0_31 = replace(
    _V0_32,
    release="0.31.0",
    loads_skip_zeroing_by_range=True,
    unsplit_where_pages_differ=False,
    mamba_mode_all_exists=True,
    lone_group_refuses_prefix_match_unit=False,
    reservation_is_per_group=False,
    loads_may_restore_windows=False,
    holders_run_while_new_are_paused=False,
    prompt_tail_excludes_last_token=False,
    dropped_block_may_be_the_last=False,
    checkpoints_at_hit_alignment=False,
    checkpoint_drop_counts_last_token=False,
    checkpoint_cap_includes_speculative=True,
    checkpoint_step_keeps_speculative=True,
    relocation_spares_checkpoint=False,
    keeps_prompt_and_interval_checkpoints=False,
    tail_at_checkpoint_position=False,
    tail_may_end_a_block=False,
)
_V0_30 = replace(
    _V0_31,
    release="0.30.0",
    long_prefill_threshold_adapts=False,
    bounded_replay_exists=False,
    adapter_and_salt_are_told_apart=False,
    holders_have_own_queue=False,
    decode_bench_fills_at_startup=False,
    blocks_reserved_for_drafts=False,
    dcp_sharded_flag=False,
    lone_request_ignores_long_prefill_threshold=False,
    skipping_the_cache_skips_the_connector=False,
    checkpoint_only_at_prefill_end=False,
    checkpoint_cap_includes_speculative=False,
    checkpoint_estimate_is_exact=True,
    mamba_estimate_is_capped=False,
    keeps_prompt_checkpoint=False,
    tail_drops_with_any_group=False,
)
_V0_29 = replace(
    _V0_30,
    release="0.29.0",
    loads_fail_by_request=False,
    lone_admission_is_padded=False,
    victim_must_be_free_at_once=False,
    eagle_resumes_at_two_boundaries=False,
    checkpoints_at_positions=False,
    checkpoint_estimate_is_exact=False,
    checkpoint_step_keeps_speculative=False,
    tail_drops_last_block=False,
    mamba_release_passes_nulls=False,
    split_by_count_of_checkpoints=True,
)

RELEASES: dict[str, Rules] = {r.release: r for r in (_V0_29, _V0_30, _V0_31, _V0_32, _V0_33)}
NEWEST = "0.33.0"


def rules_of(release: str) -> Rules:
    """The rules of a release. Raises KeyError with the known ones in the message."""
    try:
        return RELEASES[release]
    except KeyError:
        raise KeyError(f"no rules for vLLM {release}; known: {', '.join(RELEASES)}") from None
