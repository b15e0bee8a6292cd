"""One file per kind of KV cache group; `manager_for` picks the class."""

from __future__ import annotations

from sim.groups.base import GroupManager, Setting
from sim.groups.circular import CircularManager
from sim.groups.full import FullManager
from sim.groups.mamba import MambaManager
from sim.groups.sliding_window import SlidingWindowManager
from sim.scenario import MLA, AnyGroup, Circular, Full, Mamba, ScenarioError, SlidingWindow


def manager_for(group: AnyGroup, index: int, block_size: int, setting: Setting) -> GroupManager:
    """The manager of one group. Raises ScenarioError for what the model does not know."""
    if isinstance(group, (Full, MLA)):
        return FullManager(group, index, block_size, setting)
    if isinstance(group, SlidingWindow):
        return SlidingWindowManager(group, index, block_size, setting)
    if isinstance(group, Circular):
        return CircularManager(group, index, block_size, setting)
    if isinstance(group, Mamba) and group.mode == "none" and setting.pool.caching:
        raise ScenarioError("$.engine.prefix_caching", "prefix caching of Mamba groups of mode none is not modelled")
    if isinstance(group, Mamba) and group.mode == "none":
        return MambaManager(group, index, block_size, setting)
    raise ScenarioError(f"$.groups[{index}].kind", f"{group.kind} groups of this mode are not modelled")
