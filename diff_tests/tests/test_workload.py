"""Request traces: reading, chaining, the clock, what is counted, and the real scheduler beside the model."""

import csv
import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diff_tests.cli import run_cli
from diff_tests.workload.against import Difference, compared
from diff_tests.workload.prompts import TracePrefixes, prompt_tokens
from diff_tests.workload.replay import Arrivals, parse_arrivals
from diff_tests.workload.report import summary
from diff_tests.workload.sides import ModelSide
from diff_tests.workload.study import Study, StudyError, cache_of
from diff_tests.workload.trace import Chains, Labels, Row, TraceError, read
from sim.prefix import PrefixIndex
from sim.releases import NEWEST, rules_of
from sim.scenario import Engine, Full, Mamba, SlidingWindow

HASH_BLOCK = 8


def write_trace(path: Path, rows: list[tuple[float, int, int, list[int]]]) -> Path:
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    path.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows))
    return path


ROWS = [
    (0, 20, 3, [1, 2, 3]),
    (0, 16, 2, [1, 2]),
    (5, 27, 4, [1, 2, 4, 5]),
    (9, 8, 1, [9]),
    (9, 20, 5, [1, 2, 3]),
]


ONE_GROUP = (Full(block=4),)


def study(path: Path, groups=ONE_GROUP, blocks=24, arrivals="closed:2", **more) -> Study:
    clock = parse_arrivals(arrivals)
    rules = more.pop("rules", rules_of(NEWEST))
    engine = Engine(blocks=blocks, max_num_batched_tokens=more.pop("budget", 8192), max_num_seqs=8)
    scenario = cache_of(engine, groups, clock.clock, rules, more.pop("max_model_len", None))
    return Study(path, Labels(), HASH_BLOCK, clock, None, scenario, rules, **more)


def played(one: Study) -> Study:
    for _ in one.events():
        pass
    return one


# -------------------------------------------------------------------------------------------------------------- traces


def test_a_trace_is_read_plain_or_gzipped_with_other_labels(tmp_path):
    line = {"at": 3, "prompt": 9, "answer": 2, "blocks": [7, 8]}
    plain = tmp_path / "t.jsonl"
    plain.write_text(json.dumps(line) + "\n\n")
    packed = tmp_path / "t.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    labels = Labels("at", "prompt", "answer", "blocks")
    for path in (plain, packed):
        (row,) = read(path, HASH_BLOCK, labels)
        assert (row.line, row.timestamp, row.input_length, row.output_length, row.hash_ids) == (1, 3, 9, 2, [7, 8])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"input_length": 17}, "17 input tokens have 3 blocks of 8 tokens, but there are 2 hashes; --hash-block"),
        ({"input_length": 0, "hash_ids": []}, "0 input and 1 output tokens"),
        ({"output_length": -1}, "16 input and -1 output tokens"),
        ({"hash_ids": "x"}, "Expected `array`"),
        ({"timestamp": None}, "Expected `float`"),
        ({"timestamp": -2}, "before the line above"),
    ],
)
def test_a_row_that_contradicts_itself_is_refused_with_its_line(tmp_path, row, message):
    good = {"timestamp": 0, "input_length": 16, "output_length": 1, "hash_ids": [1, 2]}
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(good) + "\n" + json.dumps(good | row) + "\n")
    with pytest.raises(TraceError, match="line 2: ") as raised:
        list(read(path, HASH_BLOCK))
    assert message in str(raised.value)


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), max_size=12))
def test_chained_numbers_are_equal_exactly_where_the_prefixes_are(prompts):
    chains = Chains()
    prefixes: dict[int, tuple[int, ...]] = {}
    numbers: dict[tuple[int, ...], int] = {}
    for prompt in prompts:
        for length, number in enumerate(chains.number(prompt), start=1):
            prefix = tuple(prompt[:length])
            assert prefixes.setdefault(number, prefix) == prefix
            assert numbers.setdefault(prefix, number) == number
        assert chains.num_prefixes == len(numbers)


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=3), min_size=1, max_size=6),
    st.sampled_from([1, 2, 3, 4, 6, 8]),
    st.sampled_from([2, 4, 6]),
    st.data(),
)
def test_prefix_numbers_of_a_trace_tell_the_same_prefixes_apart_as_its_tokens_do(prompts, hash_block, trace_block, data):
    by_tokens = PrefixIndex(hash_block)
    by_trace = TracePrefixes(hash_block, trace_block)
    chains = Chains()
    pairs: set[tuple[int, int]] = set()
    for index, hash_ids in enumerate(prompts):
        num_tokens = len(hash_ids) * trace_block - data.draw(st.integers(0, trace_block - 1))
        tokens = prompt_tokens(hash_ids, num_tokens, trace_block)
        by_trace.add(index, chains.number(hash_ids), num_tokens)
        ours: list[int] = []
        theirs: list[int] = []
        for outputs in range(2 * hash_block):
            by_trace.extend(ours, tokens, index, None, None)
            by_tokens.extend(theirs, tokens, index, None, None)
            tokens.append(-1000 * index - outputs)
        assert len(ours) == len(theirs)
        pairs.update(zip(ours, theirs, strict=True))
    assert len({ours for ours, _ in pairs}) == len({theirs for _, theirs in pairs}) == len(pairs)


# --------------------------------------------------------------------------------------------------------------- clock


@pytest.mark.parametrize("text", ["closed", "closed:0", "closed:x", "step:0", "order:1", "soon", "step:-1"])
def test_a_clock_that_means_nothing_is_refused(text):
    with pytest.raises(ValueError, match="closed:N"):
        parse_arrivals(text)


def test_closed_arrivals_keep_that_many_in_flight(tmp_path):
    one = study(write_trace(tmp_path / "t.jsonl", ROWS), arrivals="closed:2")
    in_flight = [len(event.facts.scheduled) + event.num_waiting for event in one.events()]
    assert max(in_flight) == 2
    assert one.totals.requests == 5


def test_requests_arrive_at_their_time(tmp_path):
    one = study(write_trace(tmp_path / "t.jsonl", ROWS), blocks=100, arrivals="step:1")
    first = {lookup.request: event.time_ms for event in one.events() for lookup in event.facts.lookups}
    assert first == {0: 0, 1: 0, 2: 5, 3: 9, 4: 9}


def test_an_idle_engine_jumps_to_the_next_arrival(tmp_path):
    one = study(write_trace(tmp_path / "t.jsonl", [ROWS[0], (1e9, 8, 1, [9])]), arrivals="step:1")
    assert one.totals.steps == 0
    played(one)
    assert one.totals.steps == 4


def test_order_mode_finds_what_one_request_after_the_other_left(tmp_path):
    one = played(study(write_trace(tmp_path / "t.jsonl", ROWS), blocks=100, arrivals="order"))
    totals = one.totals
    # The second and the fourth row hit all but the block of their last token; the third the first two trace blocks.
    assert (totals.queries, totals.hits) == (91, 12 + 16 + 16)
    assert (totals.block_queries, totals.block_hits) == (5 + 4 + 7 + 2 + 5, 3 + 4 + 4)
    assert (totals.trace_blocks, totals.trace_blocks_seen) == (13, 2 + 2 + 3)


def test_the_same_numbers_by_hand_for_a_pool_that_evicts(tmp_path):
    path = write_trace(tmp_path / "t.jsonl", [(0, 16, 1, [1, 2]), (0, 16, 1, [3, 4]), (0, 16, 1, [1, 2])])
    small, large = (played(study(path, blocks=blocks, arrivals="order")) for blocks in (6, 9))
    # Five usable blocks: the second row leaves the first one's first block, the last to be freed.
    assert (small.totals.hits, small.num_evicted) == (4, 6)
    # Eight: all is there, but the block of the last token is taken anew, from the one that the first row freed first.
    assert (large.totals.hits, large.num_evicted) == (12, 1)


def test_rows_that_are_too_long_are_left_out_and_counted(tmp_path):
    one = played(study(write_trace(tmp_path / "t.jsonl", ROWS), blocks=24, max_model_len=20))
    assert (one.totals.requests, one.totals.too_long) == (2, 3)
    with pytest.raises(StudyError, match="give more --blocks or a smaller --max-model-len"):
        study(tmp_path / "t.jsonl", blocks=3, max_model_len=20)


def test_what_vllm_would_refuse_at_its_start_is_refused(tmp_path):
    with pytest.raises(StudyError, match=r"vLLM .* refuses this cache: "):
        study(tmp_path / "t.jsonl", budget=1, max_model_len=20)


# ---------------------------------------------------------------------------------------------------------- both sides

# Groups, and a pool in which requests are preempted.
HYBRIDS = {
    "full": ((Full(block=4),), 24),
    "full and window": ((Full(block=4), SlidingWindow(block=4, window=9)), 42),
    "full and states": ((Full(block=4), Mamba(block=4, mode="align")), 26),
}


def busy_rows() -> list[tuple[float, int, int, list[int]]]:
    """60 requests in a few conversations; they crowd a small pool."""
    rows = []
    for i in range(60):
        turns = i % 7
        rows.append((float(i // 4), HASH_BLOCK * turns + 1 + i % HASH_BLOCK, 1 + i % 9, [*range(turns), 100 + i]))
    return rows


@pytest.mark.parametrize("arrivals", ["closed:5", "step:2", "order"])
@pytest.mark.parametrize(("groups", "blocks"), HYBRIDS.values(), ids=HYBRIDS)
def test_the_real_scheduler_does_the_same_at_every_step(target, tmp_path, groups, blocks, arrivals):
    path = write_trace(tmp_path / "t.jsonl", busy_rows())
    one = study(path, groups, blocks=blocks, arrivals=arrivals, rules=target.info.rules,
                with_digests=True, max_model_len=72, budget=64)  # fmt: skip
    assert sum(1 for _ in compared(one, target)) == one.totals.steps
    assert one.totals.requests == 60
    assert one.totals.hits > 0
    assert one.num_evicted > 0
    assert (one.totals.preemptions > 0) == (arrivals != "order")


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=4), st.integers(0, HASH_BLOCK - 1)), max_size=20)
)
def test_the_run_of_full_blocks_written_out_is_what_the_manager_does(prompts):
    scenario = cache_of(Engine(blocks=12), (Full(block=4),), "order", rules_of(NEWEST), 4 * HASH_BLOCK)
    plain, whole = (ModelSide(scenario, rules_of(NEWEST), HASH_BLOCK, with_digests=True) for _ in range(2))
    assert plain.is_plain
    whole.is_plain = False
    chains = Chains()
    for index, (hash_ids, num_missing) in enumerate(prompts):
        row = Row(index, 0.0, len(hash_ids) * HASH_BLOCK - num_missing, 0, hash_ids)
        chain = chains.number(hash_ids)
        assert plain.look_up(index, row, chain) == whole.look_up(index, row, chain)


def test_another_model_is_found_out(target, tmp_path):
    path = write_trace(tmp_path / "t.jsonl", busy_rows())
    one = study(path, blocks=30, rules=target.info.rules, with_digests=True, max_model_len=72)
    one.side.pool.take(1)
    with pytest.raises(Difference, match=r"step 1: num_free: vLLM \d+, model \d+"):
        list(compared(one, target))


# -------------------------------------------------------------------------------------------------------- command line


def test_the_command_writes_rows_and_says_what_it_was_made_with(tmp_path, capsys):
    path = str(write_trace(tmp_path / "t.jsonl", ROWS))
    base = ["workload", path, "--hash-block", "8", "--block", "4", "--blocks", "30"]
    assert run_cli([*base, "--json", "--out", str(tmp_path / "o.jsonl")]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["verdict"] == "done"
    assert document["release"] == NEWEST
    assert document["caches"][0]["requests"] == 5
    about, *rows = [json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()]
    assert about["row"] == "about"
    assert about["release"] == NEWEST
    assert sum(row["row"] == "request" for row in rows) == 5
    assert sum(row["row"] == "step" for row in rows) == document["caches"][0]["steps"]
    assert run_cli([*base, "--out", str(tmp_path / "o.csv")]) == 0
    first, *lines = (tmp_path / "o.requests.csv").read_text().splitlines()
    assert first.startswith("# kvoracle ")
    assert len(list(csv.DictReader(lines))) == 5
    assert "hit rate, vLLM's" in capsys.readouterr().out


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_a_plot_shows_the_hit_rate_over_the_size(tmp_path, ending):
    pytest.importorskip("matplotlib", reason="the plot extra is not installed")
    path = str(write_trace(tmp_path / "t.jsonl", ROWS))
    picture = tmp_path / f"p.{ending}"
    sizes = ["--blocks", "30", "--blocks", "60"]
    assert run_cli(["workload", path, "--hash-block", "8", "--block", "4", *sizes, "--plot", str(picture)]) == 0
    assert picture.stat().st_size > 5000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--groups", "[{kind: sliding_window}]"], "$.groups[0]"),
        (["--groups", "full"], "--groups: give a list of groups"),
        (["--groups", "[{"], "--groups: "),
        (["--label", "when=x"], "--label when=x: give FIELD=NAME"),
        (["--label", "timestamp=x"], "line 1: Object missing required field `x`"),
        (["--arrivals", "later"], "arrivals 'later': give closed:N"),
        (["--out", "rows.txt"], "rows.txt: the file's name must end in .jsonl or .csv"),
        (["--as", "0.1.0"], "no rules for vLLM 0.1.0"),
        (["--hash-block", "4"], "--hash-block says how many tokens"),
    ],
)
def test_bad_input_is_one_line(tmp_path, capsys, arguments, message):
    path = str(write_trace(tmp_path / "t.jsonl", ROWS))
    assert run_cli(["workload", path, "--hash-block", "8", "--block", "4", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1


def test_the_sums_name_their_units(tmp_path):
    document = summary(played(study(write_trace(tmp_path / "t.jsonl", ROWS), arrivals="closed:1")))
    assert 0 < document["mean_occupancy"] <= document["peak_occupancy"] <= 1
    assert document["hit_rate"] == document["hits"] / document["queries"]
    assert "mean_occupancy" not in summary(played(study(tmp_path / "t.jsonl", arrivals="order")))


def test_the_shared_clock_type_prints_as_it_is_given():
    assert [str(parse_arrivals(text)) for text in ("closed:3", "step:2.5", "order")] == ["closed:3", "step:2.5", "order"]
    assert parse_arrivals("order") == Arrivals("order")
