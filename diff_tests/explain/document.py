"""An explanation as plain data, for `--json`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from diff_tests.explain.actual import Checked
from diff_tests.explain.explanation import Explanation
from diff_tests.explain.lookups import Lookup
from diff_tests.explain.tables import TableView


def document(explanation: Explanation, checked: Sequence[Checked] = ()) -> dict[str, Any]:
    """headline, finding and what else `Explanation` has; blocks: the life of every block in the tables; actual: pasted
    lists."""
    story = explanation.story
    shown = {row.block for table in explanation.tables for row in table.rows if row.block}
    return {
        "headline": explanation.headline,
        "title": explanation.title,
        "finding": msgspec.to_builtins(explanation.finding),
        "known_issue": explanation.known_issue[0] if explanation.known_issue is not None else None,
        "others": msgspec.to_builtins(explanation.others),
        "step": explanation.step,
        "requests": explanation.requests,
        "timeline": [{"step": moment.step, "words": moment.words} for moment in explanation.timeline],
        "tables": [_table(table) for table in explanation.tables],
        "lookups": [_lookup(lookup) for lookup in explanation.lookups],
        "decided_by": [dict(zip(("title", "sentence", "place"), rule, strict=True)) for rule in explanation.decided_by],
        "blocks": {
            str(block): msgspec.to_builtins(story.life(block)) for block in sorted(shown) if block < story.num_blocks
        },
        "notes": explanation.notes,
        "actual": [_checked(one) for one in checked],
    }


def _table(table: TableView) -> dict[str, Any]:
    return {
        "request": table.request,
        "group": table.group,
        "kind": table.group_kind,
        "block_size": table.block_size,
        "step": table.step,
        "rows": [
            {
                "position": row.position,
                "block": row.block,
                "predicted": row.block if row.predicted is None else row.predicted,
                "tokens": [row.start, row.end],
                "from": row.origin,
                **row.marks._asdict(),
                "verdict": row.verdict,
            }
            for row in table.rows
        ],
    }


def _lookup(lookup: Lookup) -> dict[str, Any]:
    groups = [part._asdict() | {"fate": part.fate._asdict()} for part in lookup.groups]
    return lookup._asdict() | {"groups": groups}


def _checked(checked: Checked) -> dict[str, Any]:
    return {
        "request": checked.pasted.request,
        "group": checked.pasted.group,
        "headline": checked.headline,
        "against": checked.against,
        "right": checked.reference,
        "missing": checked.missing,
        "ids": [
            {"index": i.index, "block": i.block, "expected": i.expected, "kind": i.kind, "words": i.words}
            for i in checked.ids
        ],
    }
