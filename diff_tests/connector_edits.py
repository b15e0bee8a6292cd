"""Single edits of the installed vLLM, most of them faults of the DecodeBenchConnector that somebody could really write.

An edit names a function and what changes in it, and is applied to the syntax tree of the installed file: nothing of
vLLM's code is kept here. An edit that finds nothing to change is an error.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

Change = Callable[[ast.AST], ast.AST | None]


class Edit(NamedTuple):
    """function: `Class.method` or a function's name. change: what becomes of each node in it; the node itself: nothing.

    causes: what a headline may give as cause. words: what its sentence has to say besides. about: what is wrong, and which
    release was so or why somebody could write it.
    """

    function: str
    change: Change
    causes: frozenset[str] = frozenset()
    words: str = ""
    about: str = ""

    def applied_to(self, source: str) -> str:
        """The source with the edit. Raises ValueError if nothing changed."""
        tree = ast.parse(source)
        editor = _Editor(self.change)
        editor.visit(_function(tree, self.function))
        if editor.num_changes != 1:
            raise ValueError(f"{self.function}: {editor.num_changes} places changed instead of one")
        return ast.unparse(ast.fix_missing_locations(tree)) + "\n"


def installed_vllm() -> Path:
    """The folder of the installed vLLM package."""
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0])


def _function(tree: ast.AST, path: str) -> ast.AST:
    for name in path.split("."):
        tree = next(node for node in ast.iter_child_nodes(tree) if getattr(node, "name", None) == name)
    return tree


class _Editor(ast.NodeTransformer):
    def __init__(self, change: Change) -> None:
        self._change = change
        self.num_changes = 0

    def visit(self, node: ast.AST) -> ast.AST | None:
        changed = self._change(node)
        if changed is not node:
            self.num_changes += 1
            return changed
        return self.generic_visit(node)


def _expression(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def _assigned(name: str, text: str) -> Change:
    """The assignment to `name` gets another value."""

    def change(node: ast.AST) -> ast.AST:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == [name]:
            return ast.Assign(targets=node.targets, value=_expression(text), lineno=node.lineno)
        return node

    return change


def _replaced(old: str, new: str) -> Change:
    """An expression becomes another one."""

    def change(node: ast.AST) -> ast.AST:
        return _expression(new) if isinstance(node, ast.expr) and ast.unparse(node) == old else node

    return change


def _without_condition(node: ast.AST) -> ast.AST:
    """A comprehension that takes everything."""
    if isinstance(node, ast.comprehension) and node.ifs:
        return ast.comprehension(target=node.target, iter=node.iter, ifs=[], is_async=0)
    return node


def _statement_becomes(old: str, new: str, node: ast.AST) -> ast.AST:
    return ast.parse(new).body[0] if isinstance(node, ast.stmt) and ast.unparse(node).startswith(old) else node


def _statement(old: str, new: str) -> Change:
    """The statement that begins like this becomes another one."""
    return partial(_statement_becomes, old, new)


def _causes(*slugs: str) -> frozenset[str]:
    return frozenset(slugs)


_SCHEDULER, _WORKER = "DecodeBenchConnectorScheduler", "DecodeBenchConnectorWorker"
_SELECT = f"{_SCHEDULER}.update_state_after_alloc"
_SLICE = "group_blocks[external_block_start:num_computed_blocks]"

EDITS: dict[str, Edit] = {
    "start_at_block_0": Edit(
        _SELECT,
        _assigned("external_block_start", "0"),
        _causes("starts_early"),
        about="Blocks are counted from the start of the table (0.29.0): a shared prefix is overwritten.",
    ),
    "start_rounded_up": Edit(
        _SELECT,
        _assigned("external_block_start", "cdiv(num_local_computed_tokens, group_block_size)"),
        _causes("starts_late"),
        about="The first block is the one behind the local tokens, though these end inside a block.",
    ),
    "end_from_external_tokens": Edit(
        _SELECT,
        _assigned("num_computed_blocks", "cdiv(num_external_tokens, group_block_size)"),
        _causes("ends_early"),
        about="The end is counted from the external tokens alone, as if there were no local ones (0.29.0).",
    ),
    "one_block_size": Edit(
        f"{_SCHEDULER}.__init__",
        _replaced("group.kv_cache_spec", "self.kv_cache_groups[0].kv_cache_spec"),
        _causes("wrong_block_size"),
        about="All groups are taken to have the first group's block size, which held while there was one size.",
    ),
    "dcp_ignored": Edit(
        f"{_SCHEDULER}.__init__",
        _assigned("dcp_world_size", "1"),
        _causes("wrong_block_size"),
        "context parallel",
        about="Blocks are taken for one rank's tokens, though under DCP they cover those of all ranks (0.29.0).",
    ),
    "dcp_everywhere": Edit(
        f"{_SCHEDULER}.__init__",
        _replaced(
            "resolve_dcp_kv_block_size(group.kv_cache_spec, dcp_world_size)",
            "group.kv_cache_spec.block_size * dcp_world_size",
        ),
        _causes("wrong_block_size"),
        "context parallel",
        about="Every group is taken for sharded, though some are replicated on all ranks.",
    ),
    "nulls_kept": Edit(
        _SELECT,
        _without_condition,
        _causes("null_selected"),
        about="Null blocks, which hold what a window has left, are selected too (0.29.0): the null block is written.",
    ),
    "circular_sliced": Edit(
        _SELECT,
        _assigned("is_circular_buffer", "False"),
        _causes("AssertionError_in_update_state_after_alloc"),
        "circular",
        about="A ring's one block is looked for by token position, as other groups' blocks are.",
    ),
    "circular_filled_with_mean": Edit(
        f"{_WORKER}.__init__",
        _assigned("self._zero_fill_group_ids", "set()"),
        _causes("wrong_value"),
        "circular",
        about="A ring, which packs other data beside numbers, is filled with the mean (0.29.0).",
    ),
    "layers_of_group_0": Edit(
        f"{_WORKER}._fill_blocks",
        _assigned("layer_names", "self.group_to_layers.get(0, [])"),
        _causes("wrong_layers"),
        about="Every group's blocks are written through the layers of the first (0.29.0).",
    ),
    "groups_swapped_in_the_metadata": Edit(
        f"{_SCHEDULER}.build_connector_meta",
        _replaced(
            "self._pending_fills.copy()", "{key: (ids[::-1], num) for key, (ids, num) in self._pending_fills.items()}"
        ),
        _causes("swapped_groups"),
        about="The lists of the groups are handed over in another order than the worker reads them in.",
    ),
    "groups_swapped_in_the_worker": Edit(
        f"{_WORKER}.start_fill_kv",
        _replaced("enumerate(block_ids_per_group)", "enumerate(block_ids_per_group[::-1])"),
        _causes("swapped_groups", "wrong_layers"),
        about="The worker reads the lists of the groups in another order than they were sent in.",
    ),
    "last_block_dropped": Edit(
        _SELECT,
        _replaced(_SLICE, "group_blocks[external_block_start:num_computed_blocks - 1]"),
        _causes("ends_early", "missing_block"),
        about="The end is taken for the last index instead of the one behind it.",
    ),
    "one_extra_block": Edit(
        _SELECT,
        _replaced(_SLICE, "group_blocks[external_block_start:num_computed_blocks + 1]"),
        _causes("ends_late"),
        about="The last token, which is computed, is counted in where it begins a block of its own.",
    ),
    "metadata_not_cleared": Edit(
        f"{_SCHEDULER}.build_connector_meta",
        _statement("self._pending_fills.clear", "pass"),
        _causes("stale_metadata"),
        about="What a step sent is sent again with every later one.",
    ),
    "request_never_forgotten": Edit(
        f"{_SCHEDULER}.request_finished",
        _statement("self._filled_requests.discard", "pass"),
        _causes("request_not_forgotten"),
        about="The end of a request is not heard: its ID, used again, gets nothing.",
    ),
    "fp8_as_plain_bytes": Edit(
        f"{_WORKER}.__init__",
        _replaced("_get_fp8_dtype(spec, vllm_config.cache_config.cache_dtype)", "None"),
        _causes("wrong_value"),
        "fp8",
        about="The mean is written into an fp8 cache as an integer (0.29.0, 0.30.0).",
    ),
    "whole_tensor": Edit(
        f"{_WORKER}._fill_block_tensor",
        _statement("kv_cache[", "kv_cache[:] = fill_values[:1].view(kv_cache.dtype)"),
        _causes("whole_tensor"),
        about="The fill goes over all blocks of a layer instead of the rows that were selected.",
    ),
}

# What repairs the known issue kernel-rows: block IDs become rows of kernel blocks.
REPAIR = (
    Edit(
        f"{_WORKER}.__init__",
        _statement("self.kv_caches", "self.kv_caches, self.num_blocks = None, kv_cache_config.num_blocks"),
    ),
    Edit(
        f"{_WORKER}._fill_block_tensor",
        _assigned(
            "block_ids_tensor",
            "torch.tensor([block * ratio + row for ratio in [len(kv_cache) // self.num_blocks] for block in block_ids"
            " for row in range(ratio)], device=kv_cache.device)",
        ),
    ),
)

# Not the connector's: new blocks are taken from the free queue in another order.
FREE_ORDER = Edit(
    "BlockPool.get_new_blocks",
    _replaced("self.free_block_queue.popleft_n(num_blocks)", "self.free_block_queue.popleft_n(num_blocks)[::-1]"),
)

_EXAMPLE, _OFFLOAD = "ExampleConnector", "OffloadingConnectorScheduler"
_LOAD = f"{_OFFLOAD}.update_state_after_alloc"

# Of connectors that keep content: the file that is edited, by the name of the edit.
KEEPER_FILES = {
    "example": "distributed/kv_transfer/kv_connector/v1/example_connector.py",
    "offloading": "distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py",
}
KEEPER_EDITS: dict[str, Edit] = {
    "example_blocks_in_another_order": Edit(
        "ReqMeta.make_meta", _assigned("block_ids_tensor", "torch.tensor(block_ids).flip(0)"), _causes("stored_unwritten")
    ),
    "example_nothing_loaded": Edit(
        f"{_EXAMPLE}.update_state_after_alloc", _replaced("num_external_tokens > 0", "False"), _causes("missing_request")
    ),
    "example_one_name_for_all": Edit(
        f"{_EXAMPLE}._found_match_for_prompt", _replaced("os.path.exists(foldername)", "True"), _causes("never_stored")
    ),
    "offloading_load_starts_late": Edit(
        _LOAD,
        _statement("load_start_gpu_block_idx = i", "load_start_gpu_block_idx = min(i + 1, num_gpu_blocks)"),
        _causes("starts_late", "missing_request"),
    ),
    "offloading_load_from_other_slots": Edit(
        _LOAD,
        _replaced("offload_keys[start_chunk_idx:end_chunk_idx]", "offload_keys[start_chunk_idx:end_chunk_idx][::-1]"),
        _causes("wrong_content"),
    ),
    "offloading_stores_the_block_before": Edit(
        f"{_OFFLOAD}._build_store_jobs",
        _statement("src_block_ids.append", "src_block_ids.append(block_ids[max(gpu_block_idx + i - 1, 0)])"),
        _causes("wrong_content"),
    ),
    "offloading_never_hurries": Edit(
        f"{_OFFLOAD}.build_connector_meta",
        _statement("self._current_batch_jobs_to_flush.update((jid", "pass"),
        _causes("store_overtaken"),
    ),
}


def edited_checkout(folder: Path, file: str, edit: Edit) -> Path:
    """The installed vLLM by links, with one file changed."""
    path = Path(file)
    here = folder / "vllm"
    there = installed_vllm()
    for part in (*path.parts, None):
        here.mkdir(parents=True)
        for entry in there.iterdir():
            if entry.name != part:
                (here / entry.name).symlink_to(entry)
        if part == path.name:
            (here / part).write_text(edit.applied_to((there / part).read_text()))
            return folder
        here, there = here / str(part), there / str(part)
    raise AssertionError("the path ends in a file")
