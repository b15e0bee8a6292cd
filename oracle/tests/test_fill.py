"""Painting, the expected image, and who owns a byte that is not as it should be."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from oracle.fill import FillCheck, LayerView
from oracle.values import FillValue, encode
from sim.history import Written

MEAN = FillValue(encode(0.015, "bfloat16"), "bfloat16")
ZERO = FillValue(encode(0.0, "raw"), "raw")
DRAWN = FillValue(b"", "bfloat16", 0.5, 0.25)
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")),
]
WINDOWS = [1 << 26, 320, 512, 1000]  # one window; windows that end with a block, inside one, and inside others
NUM_BLOCKS = 8


@dataclass
class Memory:
    """Eight blocks. Group 0 has layers a and b, 128 bytes a block each; group 1 has c, 64 bytes, over the first half of
    a's; between a's and b's pages, and at the end, are 32 bytes of padding a block."""

    buffer: Tensor
    layers: list[LayerView]

    def view(self, name: str) -> Tensor:
        return next(layer.view for layer in self.layers if layer.name == name)


def memory(device: str) -> Memory:
    buffer = torch.zeros(2 * NUM_BLOCKS * 160, dtype=torch.int8, device=device)
    words = buffer.view(torch.bfloat16)
    a = words.as_strided((NUM_BLOCKS, 4, 16), (80, 16, 1), 0)
    b = words.as_strided((NUM_BLOCKS, 4, 16), (80, 16, 1), NUM_BLOCKS * 80)
    c = words.as_strided((NUM_BLOCKS, 2, 16), (80, 16, 1), 0)
    return Memory(buffer, [LayerView(0, "a", a), LayerView(0, "b", b), LayerView(1, "c", c)])


def summary(entries: list[Written]) -> list[tuple[str, list[int], str]]:
    return [(entry.layer, entry.blocks, entry.state) for entry in entries]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=WINDOWS)
def window(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def memory_and_check(device: str, window: int) -> tuple[Memory, FillCheck]:
    made = memory(device)
    check = FillCheck(made.buffer, made.layers, [MEAN, ZERO], window)
    check.paint()
    return made, check


def fill(made: Memory, ids: list[list[int]]) -> None:
    """What a faultless worker does."""
    for layer in made.layers:
        for block in ids[layer.group]:
            layer.view[block] = 0.015 if layer.group == 0 else 0


IDS = [[3, 1], [5]]
GOOD = [("a", [3, 1], "filled"), ("b", [3, 1], "filled"), ("c", [5], "filled")]


def test_a_faultless_fill(memory_and_check: tuple[Memory, FillCheck]) -> None:
    made, check = memory_and_check
    fill(made, IDS)
    entries = check.verify(IDS)
    assert summary(entries) == GOOD
    assert [entry.value for entry in entries] == ["763c", "763c", "00"]
    assert [entry.num_bytes for entry in entries] == [256, 256, 64]


def test_nothing_asked_and_nothing_done(memory_and_check: tuple[Memory, FillCheck]) -> None:
    assert memory_and_check[1].verify([[], []]) == []
    assert memory_and_check[1].verify() == []


def test_requests_are_taken_together(memory_and_check: tuple[Memory, FillCheck]) -> None:
    made, check = memory_and_check
    fill(made, [[3, 1, 2], [5]])
    assert summary(check.verify([[3, 1], [5]], [[1, 2], []])) == [
        ("a", [3, 1, 2], "filled"),
        ("b", [3, 1, 2], "filled"),
        ("c", [5], "filled"),
    ]


def test_no_byte_of_the_paint_equals_a_fill_value(memory_and_check: tuple[Memory, FillCheck]) -> None:
    made, _ = memory_and_check
    painted = set(made.buffer.view(torch.uint8).tolist())
    assert not painted & {0x76, 0x3C, 0x00}
    assert len(painted) > 120  # it says where it is


def test_unwritten_blocks(memory_and_check: tuple[Memory, FillCheck]) -> None:
    made, check = memory_and_check
    fill(made, [[3], []])
    entries = check.verify(IDS)
    assert summary(entries) == [
        ("a", [3], "filled"),
        ("a", [1], "unwritten"),
        ("b", [3], "filled"),
        ("b", [1], "unwritten"),
        ("c", [5], "unwritten"),
    ]
    assert entries[1].num_bytes == 128


def test_a_block_written_in_part(memory_and_check: tuple[Memory, FillCheck]) -> None:
    made, check = memory_and_check
    fill(made, [[3], [5]])
    made.view("a")[1][:3] = 0.015
    made.view("b")[1] = 0.015
    entries = check.verify(IDS)
    assert summary(entries)[1] == ("a", [1], "unwritten")
    assert entries[1].num_bytes == 32


def test_another_value(memory_and_check: tuple[Memory, FillCheck]) -> None:
    made, check = memory_and_check
    fill(made, IDS)
    made.view("c")[5] = 0.015
    entries = check.verify(IDS)
    assert summary(entries) == [*GOOD[:2], ("c", [5], "wrong_value")]
    assert entries[2].value == "763c"


def test_one_wrong_byte_in_a_selected_block(memory_and_check: tuple[Memory, FillCheck]) -> None:
    made, check = memory_and_check
    fill(made, IDS)
    made.buffer[NUM_BLOCKS * 160 + 160 + 7] = 9
    wrong = [entry for entry in check.verify(IDS) if entry.state != "filled"]
    assert summary(wrong) == [("b", [1], "wrong_value")]
    assert (wrong[0].num_bytes, wrong[0].value) == (1, None)


@pytest.mark.parametrize("block", [0, 7])
def test_one_byte_outside_the_selection(memory_and_check: tuple[Memory, FillCheck], block: int) -> None:
    made, check = memory_and_check
    fill(made, IDS)
    made.buffer[block * 160 + 100] = 0
    entries = check.verify(IDS)
    assert summary(entries) == [*GOOD, ("a", [block], "outside")]
    assert entries[3].num_bytes == 1


def test_a_whole_block_outside_the_selection(memory_and_check: tuple[Memory, FillCheck]) -> None:
    made, check = memory_and_check
    fill(made, [[3, 1, 6], [5]])
    entries = check.verify(IDS)
    assert summary(entries) == [*GOOD, ("a", [6], "outside"), ("b", [6], "outside")]
    assert entries[3].value == "763c"


@pytest.mark.parametrize("block", [0, 4, 7])
def test_padding_belongs_to_nobody(memory_and_check: tuple[Memory, FillCheck], block: int) -> None:
    made, check = memory_and_check
    fill(made, IDS)
    made.buffer[block * 160 + 128 : block * 160 + 160] = 0
    entries = check.verify(IDS)
    assert summary(entries) == [*GOOD, ("", [block], "padding")]
    assert (entries[3].group, entries[3].num_bytes) == (-1, 32)


def test_where_groups_share_bytes_the_union_counts(memory_and_check: tuple[Memory, FillCheck]) -> None:
    made, check = memory_and_check
    fill(made, [[3], [3]])  # c's zeros lie over the first half of a's block
    assert summary(check.verify([[3], [3]])) == [
        ("a", [3], "filled"),
        ("b", [3], "filled"),
        ("c", [3], "filled"),
    ]


@pytest.mark.parametrize("told", [[[3, 1, 99], [5]], [[3, -1, 1], [5]], [[3, 1], [5], [6]]])
def test_ids_and_groups_that_do_not_exist_are_ignored(
    memory_and_check: tuple[Memory, FillCheck], told: list[list[int]]
) -> None:
    made, check = memory_and_check
    fill(made, IDS)
    assert summary(check.verify(told)) == GOOD


def test_painting_again_forgets_everything(memory_and_check: tuple[Memory, FillCheck]) -> None:
    made, check = memory_and_check
    fill(made, IDS)
    check.paint()
    assert check.verify() == []


@pytest.mark.parametrize("heads_outermost", [False, True])
def test_kernel_blocks_are_rows_of_a_block(device: str, window: int, heads_outermost: bool) -> None:
    num_rows = NUM_BLOCKS * 2
    buffer = torch.zeros(num_rows * 2 * 4 * 8 * 2, dtype=torch.uint8, device=device)
    view = buffer.view(torch.bfloat16).view(2, num_rows, 4, 8).transpose(0, 1)  # row, head, token, content
    if not heads_outermost:
        view = buffer.view(torch.bfloat16).view(num_rows, 4, 2, 8).transpose(1, 2)
    check = FillCheck(buffer, [LayerView(0, "a", view, 2)], [MEAN], window)
    check.paint()
    view[torch.tensor([4, 5], device=device)] = 0.015
    assert summary(check.verify([[2]])) == [("a", [2], "filled")]
    check.paint()
    view[2] = 0.015  # the block ID taken for a row
    assert summary(check.verify([[2]])) == [("a", [2], "unwritten"), ("a", [1], "outside")]


def test_drawn_values(device: str, window: int) -> None:
    made = memory(device)
    check = FillCheck(made.buffer, made.layers, [DRAWN, ZERO], window)
    check.paint()
    torch.manual_seed(5)
    ids = [[2, 6, 3], [5]]
    for name in ("a", "b"):
        for block in ids[0]:
            made.view(name)[block] = torch.normal(block / 10, 0.25, (4, 16)).to(made.buffer.device, torch.bfloat16)
    made.view("c")[5] = 0
    entries = check.verify(ids)
    assert summary(entries) == [("a", [2, 6, 3], "filled"), ("b", [2, 6, 3], "filled"), ("c", [5], "filled")]
    values = torch.cat([made.view("a")[block].flatten() for block in ids[0]]).double()
    assert entries[0].mean == pytest.approx(float(values.mean()))
    assert entries[0].std == pytest.approx(float(values.std(correction=0)))
    assert entries[2].mean is None


def test_drawn_values_that_were_not_drawn(device: str, window: int) -> None:
    made = memory(device)
    check = FillCheck(made.buffer, made.layers, [DRAWN, ZERO], window)
    check.paint()
    for name in ("a", "b"):
        made.view(name)[3] = 0.5
    made.view("b")[3][2] = float("inf")
    made.view("c")[5] = 0
    assert summary(check.verify(IDS)) == [
        ("a", [3], "filled"),
        ("a", [1], "unwritten"),
        ("b", [1], "unwritten"),
        ("b", [3], "wrong_value"),
        ("c", [5], "filled"),
    ]


def test_drawn_values_outside_the_selection(device: str, window: int) -> None:
    made = memory(device)
    check = FillCheck(made.buffer, made.layers, [DRAWN, ZERO], window)
    check.paint()
    made.view("b")[6] = 0.5
    assert summary(check.verify()) == [("b", [6], "outside")]


def test_groups_that_draw_over_the_same_bytes(device: str, window: int) -> None:
    buffer = torch.zeros(NUM_BLOCKS * 64, dtype=torch.uint8, device=device)
    view = buffer.view(torch.bfloat16).view(NUM_BLOCKS, 32)
    check = FillCheck(buffer, [LayerView(0, "a", view), LayerView(1, "b", view)], [DRAWN, DRAWN], window)
    check.paint()
    view[:] = 0.5
    every = list(range(NUM_BLOCKS))
    assert summary(check.verify([every, every])) == [("a", every, "filled"), ("b", every, "filled")]


def test_views_that_do_not_fit_are_refused() -> None:
    made = memory("cpu")
    layer_b = [made.layers[1]]
    FillCheck(made.buffer[:-32], layer_b, [MEAN])  # the last 32 bytes are padding
    for wrong in (made.buffer[:-33], made.buffer[NUM_BLOCKS * 160 + 1 :]):
        with pytest.raises(ValueError, match="outside"):
            FillCheck(wrong, layer_b, [MEAN])
    with pytest.raises(ValueError, match="whole blocks of 3 rows"):
        FillCheck(made.buffer, [LayerView(0, "a", made.view("a"), 3)], [MEAN])
    with pytest.raises(ValueError, match="flat bytes"):
        FillCheck(made.buffer.view(torch.bfloat16), made.layers, [MEAN, ZERO])
