"""Byte-exact verification of a fill on device memory large enough to be judged in several windows."""

from __future__ import annotations

import pytest
import torch

from gpu_tests.conftest import DEVICES
from oracle import fill as fill_module
from oracle.fill import FillCheck, LayerView
from oracle.values import FillValue, encode

NUM_BLOCKS = 2048
PAGE_ELEMENTS = 2048  # bfloat16: 4 KiB a block and layer
WINDOW_BYTES = 1 << 20
MEAN = FillValue(encode(0.015, "bfloat16"), "bfloat16")


@pytest.fixture(params=[True, False], ids=["stretches", "rows"])
def by_stretches(request, monkeypatch):
    """Windows are judged stretch by stretch, or, as where stretches are many, all at once and then row by row."""
    if not request.param:
        monkeypatch.setattr(fill_module, "_MOST_PIECES", {})
        monkeypatch.setattr(fill_module, "_MOST_PIECES_ELSEWHERE", 0)


@pytest.fixture(params=DEVICES)
def memory(request, by_stretches):
    """Two layers of one group, layer outermost; a third in a group of its own over the bytes of the first."""
    buffer = torch.zeros(2 * NUM_BLOCKS * PAGE_ELEMENTS * 2, dtype=torch.int8, device=request.param)
    elements = buffer.view(torch.bfloat16).view(2, NUM_BLOCKS, 4, 16, PAGE_ELEMENTS // 64)
    layers = [LayerView(0, "a", elements[0]), LayerView(0, "b", elements[1]), LayerView(1, "c", elements[0])]
    check = FillCheck(buffer, layers, [MEAN, MEAN], WINDOW_BYTES)
    check.paint()
    return buffer, elements, check


def fill(elements, ids, layers=(0, 1)):
    for layer in layers:
        elements[layer][torch.tensor(ids, device=elements.device)] = 0.015


def test_a_fill_that_is_right_is_right(memory):
    _, elements, check = memory
    ids = [1, 2, 700, 2047]
    fill(elements, ids)
    written = check.verify([ids, []])
    assert {(entry.layer, entry.state) for entry in written} == {("a", "filled"), ("b", "filled")}
    assert all(entry.blocks == ids for entry in written)


def test_groups_over_the_same_bytes_count_together(memory):
    _, elements, check = memory
    fill(elements, [5])
    fill(elements, [9], layers=[0])
    assert {entry.state for entry in check.verify([[5], [9]])} == {"filled"}


def test_one_byte_outside_is_found_wherever_it_is(memory):
    buffer, elements, check = memory
    fill(elements, [3])
    buffer[-1] += 1
    outside = [entry for entry in check.verify([[3], []]) if entry.state == "outside"]
    assert [(entry.layer, entry.blocks, entry.num_bytes) for entry in outside] == [("b", [NUM_BLOCKS - 1], 1)]


def test_a_block_left_out_is_found(memory):
    _, elements, check = memory
    fill(elements, [3])
    unwritten = [entry for entry in check.verify([[3, 4], []]) if entry.state == "unwritten"]
    assert {(entry.layer, tuple(entry.blocks)) for entry in unwritten} == {("a", (4,)), ("b", (4,))}


def test_another_value_is_found(memory):
    _, elements, check = memory
    fill(elements, [3])
    elements[1][3] = 1.0
    wrong = [entry for entry in check.verify([[3], []]) if entry.state == "wrong_value"]
    assert [(entry.layer, entry.blocks, entry.value) for entry in wrong] == [("b", [3], "803f")]


def test_what_is_right_is_seen_at_a_glance(memory, monkeypatch):
    """Sorting bytes costs many times as much: it is for what is wrong."""
    _, elements, check = memory
    monkeypatch.setattr(FillCheck, "_expected", lambda *_: pytest.fail("a right window was looked at again"))
    ids = list(range(3, 200)) + list(range(300, 2000, 7))
    fill(elements, ids)
    assert {entry.state for entry in check.verify([ids, []])} == {"filled"}


@pytest.mark.parametrize("device", DEVICES)
def test_groups_that_write_different_values_into_one_block(device, by_stretches):
    """The later one stays."""
    buffer = torch.zeros(64 * 4096, dtype=torch.int8, device=device)
    elements = buffer.view(torch.bfloat16).view(64, 2048)
    zero = FillValue(encode(0.0, "raw"), "raw")
    check = FillCheck(buffer, [LayerView(0, "a", elements), LayerView(1, "b", elements)], [MEAN, zero], 1 << 14)
    check.paint()
    elements[5] = 0.0
    wrong = {(entry.layer, entry.state) for entry in check.verify([[5], [5]])}
    assert ("b", "filled") in wrong
    elements[5] = 0.015
    assert ("b", "wrong_value") in {(entry.layer, entry.state) for entry in check.verify([[5], [5]])}


FORMATS = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


def _one_layer(device, name):
    """64 blocks of 1,024 elements, and the same as numbers."""
    buffer = torch.zeros(64 * 1024 * FORMATS[name].itemsize, dtype=torch.uint8, device=device)
    return buffer, buffer.view(FORMATS[name]).view(64, 1024)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", FORMATS)
def test_a_device_writes_each_format_as_it_is_encoded(device, name):
    buffer, elements = _one_layer(device, name)
    check = FillCheck(buffer, [LayerView(0, "a", elements)], [FillValue(encode(0.015, name), name)], 1 << 14)
    check.paint()
    elements[7] = torch.full((1024,), 0.015, device=device).to(FORMATS[name])
    (entry,) = check.verify([[7]])
    assert (entry.state, entry.blocks) == ("filled", [7])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", FORMATS)
def test_values_that_a_device_draws(device, name):
    buffer, elements = _one_layer(device, name)
    value = FillValue(b"", name, mean=0.5, std=0.25)
    check = FillCheck(buffer, [LayerView(0, "a", elements)], [value], 1 << 14)
    check.paint()
    elements[3:9] = torch.normal(0.5, 0.25, (6, 1024), device=device).to(FORMATS[name])
    (entry,) = check.verify([[3, 4, 5, 6, 7, 8]])
    assert (entry.state, entry.blocks) == ("filled", [3, 4, 5, 6, 7, 8])
    assert entry.mean == pytest.approx(0.5, abs=0.03)
    assert entry.std == pytest.approx(0.25, abs=0.03)
    check.paint()
    elements[3] = torch.full((1024,), float("nan"), device=device).to(FORMATS[name])
    assert {entry.state for entry in check.verify([[3, 4]])} >= {"wrong_value", "unwritten"}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", FORMATS)
def test_paint_is_small_numbers(device, name):
    """An engine that reads paint goes on computing."""
    buffer, elements = _one_layer(device, name)
    FillCheck(buffer, [LayerView(0, "a", elements)], [FillValue(encode(0.015, name), name)]).paint()
    assert float(elements.float().abs().max()) < 2
