"""One file per kind of KV cache group; `manager_for` picks the class."""

from __future__ import annotations

from sim.groups.base import GroupManager, Setting
from sim.groups.chunked_local import ChunkedLocalManager
from sim.groups.circular import CircularManager
from sim.groups.cross import CrossManager
from sim.groups.full import FullManager, RSWAManager
from sim.groups.mamba import MambaAlignManager, MambaManager
from sim.groups.sliding_window import SlidingWindowManager
from sim.scenario import (
    RSWA,
    AnyGroup,
    ChunkedLocal,
    Circular,
    Cross,
    Mamba,
    SlidingWindow,
    SlidingWindowMLA,
)


def manager_for(group: AnyGroup, index: int, block_size: int, setting: Setting) -> GroupManager:
    """The manager of one group."""
    match group:
        case SlidingWindow() | SlidingWindowMLA():
            return SlidingWindowManager(group, index, block_size, setting)
        case ChunkedLocal():
            return ChunkedLocalManager(group, index, block_size, setting)
        case Circular():
            return CircularManager(group, index, block_size, setting)
        case Cross():
            return CrossManager(group, index, block_size, setting)
        case RSWA():
            return RSWAManager(group, index, block_size, setting)
        case Mamba(mode="align"):
            return MambaAlignManager(group, index, block_size, setting)
        case Mamba():
            return MambaManager(group, index, block_size, setting)
        case _:
            return FullManager(group, index, block_size, setting)
