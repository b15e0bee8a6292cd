"""What differs between vLLM releases: one named rule each. Nowhere else does the model look at a release number."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The rules of one release. A comment beside each says since when it holds."""

    release: str

    dcp_sharded_flag: bool
    """Each spec says whether decode context parallelism shards it (0.31+). Before, full attention and MLA were
    sharded, and anything else was refused under it."""

    lone_request_ignores_long_prefill_threshold: bool
    """The long-prefill threshold is off while a single request is running or waiting (0.31+)."""

    prompt_tail_excludes_last_token: bool
    """The partial key of a prompt's tail ends at the last hash boundary at or below P - 1 tokens (0.32+), before at or
    below P; it matters where P is a multiple of the hash block size."""


    lone_group_refuses_prefix_match_unit: bool
    """A prefix match unit that a single group would ignore is refused (0.32+)."""

    mamba_prefix_caching_requires_align: bool
    """Prefix caching of a Mamba group in another mode than `align` is refused (0.33+)."""


_V0_33 = Rules(
    release="0.33.0",
    lone_group_refuses_prefix_match_unit=True,
    mamba_prefix_caching_requires_align=True,
    dcp_sharded_flag=True,
    lone_request_ignores_long_prefill_threshold=True,
    prompt_tail_excludes_last_token=True,
)
_V0_32 = replace(_V0_33, release="0.32.0", mamba_prefix_caching_requires_align=False)
_V0_31 = replace(
    _V0_32, release="0.31.0", prompt_tail_excludes_last_token=False, lone_group_refuses_prefix_match_unit=False
)
_V0_30 = replace(_V0_31, release="0.30.0", dcp_sharded_flag=False, lone_request_ignores_long_prefill_threshold=False)
_V0_29 = replace(_V0_30, release="0.29.0")

RELEASES: dict[str, Rules] = {r.release: r for r in (_V0_29, _V0_30, _V0_31, _V0_32, _V0_33)}
NEWEST = "0.33.0"


def rules_of(release: str) -> Rules:
    """The rules of a release. Raises KeyError with the known ones in the message."""
    try:
        return RELEASES[release]
    except KeyError:
        raise KeyError(f"no rules for vLLM {release}; known: {', '.join(RELEASES)}") from None
