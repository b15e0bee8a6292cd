"""Laws 4 to 6: what the connector selects, what the worker receives, what the fill leaves in memory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from oracle.causes import (
    Asked,
    Cause,
    FillAsked,
    are_swapped,
    routing_cause,
    selection_causes,
    unwritten_cause,
    written_cause,
)
from oracle.contracts import Contract, FillsStates
from oracle.findings import token_range
from oracle.laws.trial import End, Trial, law
from oracle.selection import NULL, blocks_of_tokens
from oracle.values import ELEMENT_BYTES, FillValue, clamped_moments
from sim.geometry import block_sizes
from sim.history import Scheduled, Selection, Selections, Start, Written


@law(
    4,
    "Per group exactly the blocks that the connector's contract derives, token by token, from the external tokens and the "
    "block table are selected, in the step of the admission.",
    (Scheduled,),
    judges_direct=True,
)
def check_selection(trial: Trial, record: Scheduled) -> None:
    """Law 4: every request that was granted external tokens in this step, and nobody else."""
    if record.selected is None or trial.contract is None:
        return
    for request, num_external in record.external.items():
        tables = trial.replay.tables.get(request)
        if num_external and tables is not None:
            _check_selected(trial, record, request, num_external, tables)
    for request in record.selected:
        if not record.external.get(request):
            cause = "stale_metadata" if request in trial.last_sent else "unasked_selection"
            observed = record.selected[request].groups
            message = f"blocks {observed} selected, but it was granted no external tokens in this step"
            trial.report("selection", 4, cause, message, request=request, observed=observed)


def _check_selected(
    trial: Trial, record: Scheduled, request: str, num_external: int, tables: Sequence[Sequence[int]]
) -> None:
    assert trial.contract is not None
    assert record.selected is not None
    num_local = record.hits.get(request, 0)
    expected = trial.contract.loads(tables, num_local, num_external)
    selection = record.selected.get(request)
    if selection is None:
        if any(expected):
            message = f"nothing selected for external {token_range(num_local, num_local + num_external)}"
            trial.report("selection", 4, "missing_request", message, request=request, expected=expected)
        return
    if selection.tokens is not None and selection.tokens != num_external:
        message = f"{selection.tokens} external tokens announced, {num_external} granted"
        trial.report(
            "selection", 4, "wrong_tokens", message, request=request, expected=num_external, observed=selection.tokens
        )
    if selection.groups == expected:
        return
    if len(selection.groups) != len(expected):
        message = f"blocks for {len(selection.groups)} groups selected instead of {len(expected)}"
        trial.report(
            "selection", 4, "wrong_group_count", message, request=request, expected=expected, observed=selection.groups
        )
        return
    num_cut = _num_offered(record, request) - num_external
    if num_cut > 0 and _is_shifted(trial, tables, selection.groups, num_local + num_cut, num_external):
        granted, taken = (token_range(start, start + num_external) for start in (num_local, num_local + num_cut))
        message = f"blocks {selection.groups} selected, for {taken}, as if the {num_cut} tokens more that were offered had "
        message += f"been granted; expected {expected}, for external {granted}"
        trial.report(
            "selection", 4, "counted_from_offer", message, request=request, expected=expected, observed=selection.groups
        )
        return
    if are_swapped(expected, selection.groups):
        message = f"blocks {selection.groups} selected, which are right, but in the places of other groups: {expected}"
        trial.report(
            "selection", 4, "swapped_groups", message, request=request, expected=expected, observed=selection.groups
        )
        return
    for group, (right, chosen) in enumerate(zip(expected, selection.groups, strict=True)):
        if right != chosen:
            asked = Asked(
                tables,
                group,
                trial.replay.groups[group].block_size,
                _other_sizes(trial, group),
                num_local,
                num_local + num_external,
                _size_words(trial, group),
            )
            for cause in selection_causes(asked, right, chosen):
                _report_selection(trial, request, asked, cause, right, chosen)


def _is_shifted(
    trial: Trial, tables: Sequence[Sequence[int]], chosen: Sequence[Sequence[int]], start: int, num_tokens: int
) -> bool:
    """Whether the blocks of `num_tokens` tokens from `start` on were chosen, in a group of states with or without those
    before the last."""
    assert trial.contract is not None
    sizes = [view.block_size for view in trial.replay.groups]
    return len(chosen) == len(tables) and all(
        ids in (right, blocks_of_tokens(table, size, start, start + num_tokens))
        for ids, right, table, size in zip(
            chosen, trial.contract.loads(tables, start, num_tokens), tables, sizes, strict=True
        )
    )


def _num_offered(record: Scheduled, request: str) -> int:
    """External tokens that the connector answered last in this step; 0 where it is not known."""
    return next((answered or 0 for asked, _, answered in reversed(record.asked or ()) if asked == request), 0)


def _other_sizes(trial: Trial, group: int) -> list[int]:
    """Block sizes that are not this group's, but that somebody might take for it."""
    scenario = trial.scenario
    sizes = [scenario.groups[group].block, *block_sizes(scenario, trial.rules)]
    for view, spec in zip(trial.replay.groups, scenario.groups, strict=True):
        sizes += [view.block_size, spec.block]
    own = trial.replay.groups[group].block_size
    return [size for size in dict.fromkeys(sizes) if size != own]


def _size_words(trial: Trial, group: int) -> dict[int, str]:
    """How decode context parallelism leads to a wrong block size."""
    block, dcp = trial.scenario.groups[group].block, trial.scenario.engine.dcp
    if dcp == 1:
        return {}
    if trial.replay.groups[group].block_size == block:
        return {block * dcp: f"decode context parallelism of {dcp} applied to a group that is not sharded"}
    return {block: f"decode context parallelism of {dcp} ignored"}


def _report_selection(
    trial: Trial, request: str, asked: Asked, cause: Cause, expected: list[int], observed: list[int]
) -> None:
    """Names the first block that is wrong, whose tokens it holds, and what should have been there."""
    table, replay = asked.table, trial.replay
    external = f"external {token_range(asked.start, asked.end)}"
    wrong = next((block for block in observed if block not in expected and block != NULL), None)
    missing = next((block for block in expected if block not in observed), None)
    if cause.slug == "null_selected":
        wrong, missing = NULL, None
    parts = []
    if wrong is not None:
        where = f"position {table.index(wrong)}: " if wrong in table else ""
        parts.append(f"{where}block {wrong} selected, which {replay.describe(wrong)}")
    if missing is not None:
        verb = "expected" if wrong is not None else "missing"
        parts.append(f"{verb} position {table.index(missing)}: block {missing}, for {external}")
    elif cause.slug in ("wrong_order", "duplicate_block"):
        parts.append(f"blocks {observed} selected instead of {expected}")
    else:
        parts.append(f"expected blocks {expected}, for {external}")
    trial.report(
        "selection",
        4,
        cause.slug,
        "; ".join(parts) + cause.words,
        request=request,
        group=asked.group,
        positions=cause.positions,
        expected=expected,
        observed=observed,
    )


@law(5, "The worker receives, in the same step, exactly what the scheduler selected.", (Scheduled,), judges_direct=True)
def check_routing(trial: Trial, record: Scheduled) -> None:
    """Law 5."""
    sent, received = record.selected, record.received
    if sent is None or received is None:
        return
    if sent != received:
        for request in dict.fromkeys([*sent, *received]):
            if sent.get(request) != received.get(request):
                _report_routing(trial, request, sent.get(request), received.get(request))
    elif list(sent) != list(received):
        trial.report("routing", 5, "wrong_order", f"requests {list(received)} arrived, {list(sent)} were sent")
    if sent:
        trial.last_sent = sent


def _report_routing(trial: Trial, request: str, sent: Selection | None, received: Selection | None) -> None:
    if sent is None or received is None or received == trial.last_sent.get(request):
        stale = received is not None and request in trial.last_sent
        cause = "stale_metadata" if stale else "missing_request" if received is None else "extra_request"
        told = "nothing" if received is None else f"blocks {received.groups}"
        message = f"the worker was told {told}, the scheduler had selected {sent.groups if sent else 'nothing'}"
        return trial.report(
            "routing",
            5,
            cause,
            message,
            request=request,
            expected=sent and sent.groups,
            observed=received and received.groups,
        )
    if sent.tokens != received.tokens or len(sent.groups) != len(received.groups):
        message = f"the worker was told {received}, the scheduler had sent {sent}"
        return trial.report("routing", 5, "wrong_tokens", message, request=request)
    if are_swapped(sent.groups, received.groups):
        message = f"blocks {sent.groups} selected, which arrived in the places of other groups: {received.groups}"
        return trial.report(
            "routing", 5, "swapped_groups", message, request=request, expected=sent.groups, observed=received.groups
        )
    for group, (ids, arrived) in enumerate(zip(sent.groups, received.groups, strict=True)):
        if ids != arrived:
            cause = routing_cause(ids, arrived)
            lost, added = [b for b in ids if b not in arrived], [b for b in arrived if b not in ids]
            message = f"blocks {ids} selected, blocks {arrived} received"
            if lost:
                message += f"; block {lost[0]}, which {trial.replay.describe(lost[0])}, did not arrive"
            elif added:
                message += f"; block {added[0]}, which {trial.replay.describe(added[0])}, was not sent"
            trial.report("routing", 5, cause, message, request=request, group=group, expected=ids, observed=arrived)
    return None


@law(
    6,
    "A fill leaves the contract's value in every byte of every layer's view of the received blocks, and every other byte "
    "of KV memory as it was.",
    (Start, Scheduled),
    judges_direct=True,
)
def check_fill(trial: Trial, record: Start | Scheduled) -> None:
    """Law 6: in each layer the blocks that the worker was told to write, and nothing else."""
    if isinstance(record, Start):
        trial.layers = [group.layers for group in record.groups] or trial.layers
    if trial.contract is None or record.written is None:
        return
    if isinstance(record, Start):
        wanted = trial.contract.startup_fill()
    elif record.written or record.received:
        wanted = _union(record.received or {}, len(trial.layers))
    else:
        return
    fill = FillAsked(wanted, trial.rows_per_block)
    looked_at = {entry.layer for entry in record.written}
    in_pages = [entry for entry in record.written if entry.tensor is None]
    for one, other in _swapped_groups(trial.contract.values, in_pages, fill):
        message = f"the blocks of groups {one} and {other} were written through each other's layers"
        trial.report("fill", 6, "swapped_groups", message, group=one, expected=wanted[one], observed=wanted[other])
    all_right = all(entry.state == "filled" for entry in record.written)
    for entry in record.written:
        if entry.state != "filled":
            _report_written(trial, record, entry, fill)
        elif entry.mean is not None and entry.std is not None and (all_right or not _took_rows(fill, entry)):
            value = _value_of(trial.contract, entry.group, entry.tensor)
            num_elements = entry.num_bytes // ELEMENT_BYTES[value.dtype]  # divides evenly
            trial.drawn.setdefault((entry.group, entry.tensor), []).append((num_elements, entry.mean, entry.std))
    for group, ids in enumerate(wanted):
        for layer in trial.layers[group][len(trial.scenario.groups[group].unknown) :] if ids else ():
            if layer not in looked_at:
                message = f"layer {layer}: nothing is known of blocks {ids}, which were to be written"
                trial.report("fill", 6, "not_looked_at", message, group=group, expected=ids)


def _took_rows(fill: FillAsked, entry: Written) -> bool:
    """Whether other groups' values fell into these blocks too, if block IDs were taken for rows: then their numbers tell
    nothing of what was drawn."""
    others = [fill.written_as_rows(group) for group in range(len(fill.wanted)) if group != entry.group]
    return entry.tensor is None and not set(entry.blocks).isdisjoint(set().union(*others))


def _value_of(contract: Contract, group: int, tensor: int | None) -> FillValue:
    """What a fill leaves in a group's pages, or in one of the tensors that its layers are kept as."""
    if tensor is None or not isinstance(contract, FillsStates):
        return contract.values[group]
    return contract.states[group][tensor]


def _swapped_groups(values: Sequence[FillValue], written: Sequence[Written], fill: FillAsked) -> list[tuple[int, int]]:
    """Pairs of groups that were written through each other's layers.

    Each group's blocks hold the other's value; or each group's layers hold the other's blocks in place of their own. Where
    groups share memory, layers that both have come out right either way: then the layers that one has more tell.
    """
    wrong = {(entry.group, entry.value) for entry in written if entry.state == "wrong_value"}
    if any(ratio > 1 for ratio in fill.rows_per_block):
        return []  # rows taken for blocks look alike
    if not wrong and all(entry.state != "unwritten" for entry in written):
        return []
    ids = [sorted(blocks) for blocks in fill.wanted]
    return [
        (one, other)
        for one, other in combinations([group for group, blocks in enumerate(ids) if blocks], 2)
        if (_holds_value(wrong, one, values[other]) and _holds_value(wrong, other, values[one]))
        or _hold_each_others(_places(written, one), _places(written, other), ids[one], ids[other])
    ]


def _holds_value(wrong: set[tuple[int, str | None]], group: int, value: FillValue) -> bool:
    """Whether blocks of the group hold another group's value, told by elements of its own size."""
    element = value.element.hex()
    return any(
        found is not None and bool(element) and found == element * (len(found) // len(element))  # floors: or unequal
        for holder, found in wrong
        if holder == group
    )


def _places(written: Sequence[Written], group: int) -> list[dict[str, list[int]]]:
    """For each layer of a group: its blocks by state."""
    layers: dict[str, dict[str, list[int]]] = {}
    for entry in written:
        if entry.group == group:
            layers.setdefault(entry.layer, {}).setdefault(entry.state, []).extend(entry.blocks)
    return [{state: sorted(blocks) for state, blocks in layer.items()} for layer in layers.values()]


def _hold_each_others(
    mine: Sequence[dict[str, list[int]]], theirs: Sequence[dict[str, list[int]]], my_ids: list[int], their_ids: list[int]
) -> bool:
    swapped = [{"unwritten": my_ids, "outside": their_ids} in mine, {"unwritten": their_ids, "outside": my_ids} in theirs]
    right = [{"filled": my_ids} in mine, {"filled": their_ids} in theirs]
    return all(swapped) or (all(right) and any(swapped))


def _union(received: Selections, num_groups: int) -> list[list[int]]:
    """Blocks that the worker was told to write, by group, over all requests."""
    wanted: list[dict[int, None]] = [{} for _ in range(num_groups)]
    for selection in received.values():
        for blocks, ids in zip(wanted, selection.groups, strict=False):  # another number of groups is law 4's business
            blocks.update(dict.fromkeys(ids))
    return [list(ids) for ids in wanted]


def _report_written(trial: Trial, record: Start | Scheduled, entry: Written, fill: FillAsked) -> None:
    """One entry of a fill that is not as it should be."""
    assert trial.contract is not None
    group, blocks = entry.group, entry.blocks
    if entry.state == "padding":
        message = f"{entry.num_bytes} bytes that belong to no layer were written, in the pages of blocks {blocks}"
        return trial.report("fill", 6, "padding_written", message, observed=blocks)
    if entry.tensor is not None:
        return _report_states(trial, record, entry)
    what = f"layer {entry.layer}: {entry.num_bytes} bytes of blocks {blocks}"
    if entry.state == "unwritten":
        cause = unwritten_cause(fill, group, blocks)
        message = f"{what} were to be written, but were not"
        if cause == "wrong_layers":
            message += "; at most other groups' blocks were written there"
    elif entry.state == "wrong_value":
        cause, group = written_cause(fill, group, blocks, "wrong_value")
        value = trial.contract.values[entry.group]
        right = f"drawn {value.dtype} values" if value.is_random else f"{value.element.hex()} ({_in_words(value)})"
        message = f"{what} are wrong: elements {entry.value or 'of no one value'} instead of {right}"
    else:
        cause, group = written_cause(fill, group, blocks, "outside_selection")
        message = f"{what} were written unasked; block {blocks[0]} {trial.replay.describe(blocks[0])}"
        if cause != "wrong_rows" and len(set(blocks).union(*fill.wanted)) == trial.replay.num_blocks:
            cause = "whole_tensor"
            message += f"; all {trial.replay.num_blocks} blocks of the pool were written, not those selected"
    request = _request_of(record, group, blocks)
    return trial.report(
        "fill", 6, cause, message, request=request, group=group, expected=list(fill.wanted[group]), observed=blocks
    )


def _report_states(trial: Trial, record: Start | Scheduled, entry: Written) -> None:
    """A tensor of states that is not as it should be."""
    assert trial.contract is not None
    value = _value_of(trial.contract, entry.group, entry.tensor)
    right = f"drawn {value.dtype} values" if value.is_random else f"{value.element.hex()} ({_in_words(value)})"
    cause, words = {
        "unwritten": ("missing_states", "were to be written, but were not"),
        "wrong_value": ("wrong_value", f"are wrong: elements {entry.value or 'of no one value'} instead of {right}"),
        "outside": ("outside_selection", "were written unasked"),
    }[entry.state]
    message = f"layer {entry.layer}, state tensor {entry.tensor}: {entry.num_bytes} bytes {words}"
    received = record.received or {} if isinstance(record, Scheduled) else {}
    request = next((name for name, selection in received.items() if any(selection.groups[entry.group :][:1])), None)
    trial.report("fill", 6, cause, message, request=request, group=entry.group)


def _in_words(value: FillValue) -> str:
    """`0.015 as fp8_e4m3`; memory without a number format of its own is all zeros."""
    return "zeros" if value.dtype == "raw" else f"{value.mean:g} as {value.dtype}"


def _request_of(record: Start | Scheduled, group: int, blocks: Sequence[int]) -> str | None:
    """The request for which the first of these blocks was to be written, if any."""
    received = record.received or {} if isinstance(record, Scheduled) else {}
    for request, selection in received.items():
        if any(block in ids for ids in selection.groups[group : group + 1] for block in blocks):
            return request
    return None


@law(
    6,
    "Values that are drawn at random are finite, differ from what was there, and follow the contract's distribution.",
    (End,),
    judges_direct=True,
)
def check_distribution(trial: Trial, record: End) -> None:
    """Law 6, random fills: mean and deviation over the whole run, within what its number of values lets one tell."""
    for (group, tensor), samples in trial.drawn.items():
        assert trial.contract is not None
        value = _value_of(trial.contract, group, tensor)
        right_mean, right_std = clamped_moments(value.mean, value.std, value.dtype)
        count = sum(n for n, _, _ in samples)
        mean = sum(n * m for n, m, _ in samples) / count
        std = (sum(n * (s * s + m * m) for n, m, s in samples) / count - mean * mean) ** 0.5
        grain = 0.02 * (abs(right_mean) + right_std)  # rounding to 2 or 3 bits of fraction shifts this much
        error = 6 * value.std / count**0.5  # six standard errors: one false alarm in 500 million
        if abs(mean - right_mean) > grain + error or abs(std - right_std) > 5 * grain + error:
            message = f"{count} drawn values have mean {mean:.4g} and deviation {std:.4g}"
            message += f" instead of {right_mean:.4g} and {right_std:.4g}"
            trial.report(
                "fill",
                6,
                "wrong_distribution",
                message,
                group=group,
                expected=[right_mean, right_std],
                observed=[mean, std],
            )
