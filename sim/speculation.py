"""What a speculator asks of the engine. Counts in tokens."""

from __future__ import annotations

from sim.releases import Rules
from sim.scenario import Engine, Scenario


def has_eagle(engine: Engine) -> bool:
    """Whether the speculator is of EAGLE's kind."""
    return engine.speculative is not None and engine.speculative.method == "eagle"


def num_lookahead(engine: Engine) -> int:
    """Slots past the scheduled tokens into which a speculator with layers of its own writes."""
    speculative = engine.speculative
    return speculative.tokens if speculative is not None and speculative.method != "ngram" else 0


def num_draft_slots(engine: Engine) -> int:
    """Rows of each request's input that drafting beside the main model takes."""
    return 1 if engine.speculative is not None and engine.speculative.method == "draft_model" else 0


def hash_lookahead(scenario: Scenario, rules: Rules) -> int:
    """Tokens after a hash block that its key covers: the speculator of EAGLE has seen the next one."""
    engine = scenario.engine
    if not has_eagle(engine) or not rules.hashes_look_ahead_for_eagle:
        return 0
    return 1 if engine.prefix_caching and scenario.connector is None else 0


def dropping_groups(scenario: Scenario, rules: Rules) -> frozenset[int]:
    """The groups whose hits lose their last block: a speculator's own, or all if none is marked."""
    eagle = has_eagle(scenario.engine)
    marked = frozenset(index for index, group in enumerate(scenario.groups) if group.draft)
    if eagle and not marked:
        marked = frozenset(range(len(scenario.groups)))
    if hash_lookahead(scenario, rules) or (rules.marked_groups_drop_only_with_eagle and not eagle):
        return frozenset()
    return marked
