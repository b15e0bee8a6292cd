"""What a fill did to KV memory, byte by byte: paint all of it, let the worker write, compare with what should be there.

Pure torch, on any device. Memory is one flat buffer; each layer is a strided view into it, and layers of different
groups overlay the same bytes. Everything is judged on bytes, so equal numbers of another dtype cannot hide a fault.

Work goes through the buffer in windows, so that the extra memory stays bounded however large the buffer is. A window
judges its own bytes and holds a margin on both sides, so that every strip that reaches into it lies inside whole.

What is right is seen fast: a window is cut into stretches that must hold paint and stretches that must hold one constant,
each compared as it lies; where they are many, all of it is compared with paint, and the rows that were to be written with
their constant. The answers are fetched once. Only windows that are wrong, or drawn at random, are compared with an image of
what they should be, and sorted byte by byte.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import product
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from oracle.values import FillValue
from sim.history import Written

_WORD = 8
"""Bytes compared at a time."""

_PAINT_PERIOD = 65521 * _WORD
"""Bytes after which the paint repeats: whole words, and a prime number of them, so that no block, page or layer stride is
a multiple of it."""

_MOST_PIECES = {"cpu": 256}
_MOST_PIECES_ELSEWHERE = 16
"""Stretches of a window that are compared one by one. Each costs an operation or two, however short it is, and starting one
costs more on a device than on a CPU."""

_CPU_WINDOW_BYTES, _DEVICE_WINDOW_BYTES = 1 << 26, 1 << 28
"""Large enough that starting an operation costs little beside it."""

_NAN_BYTES = (0x7F, 0xFF)
"""Paint under random fills: in float16 and fp8 every element of these bytes is NaN, in bfloat16 and float32 it is NaN
or a number of 1e38, so that no drawn value can equal it."""

_SMALL_BYTES = tuple(byte for byte in range(256) if not byte & 0x40)
"""Paint under constant fills: elements of these bytes are numbers below 2 in every format, so that an engine which reads
paint in place of what its cache held goes on computing with numbers."""

_TORCH_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "raw": torch.uint8,
}

NO_GROUP = -1
"""The group of bytes that belong to no layer's view."""


class LayerView(NamedTuple):
    """One layer's KV cache. view: any shape and strides, inside the buffer given to FillCheck; dimension 0 counts kernel
    blocks, `rows_per_block` of which make one manager block."""

    group: int
    name: str
    view: Tensor
    rows_per_block: int = 1


class FillCheck:
    """Paints a KV buffer and judges what a fill did to it.

    buffer: the flat storage, one dimension, one byte an element. layers: every layer's view. values: what a fill leaves
    in each group, by group index. window_bytes bounds the extra memory to a few times as much; None: by the device.
    """

    def __init__(
        self,
        buffer: Tensor,
        layers: Sequence[LayerView],
        values: Sequence[FillValue],
        window_bytes: int | None = None,
    ) -> None:
        if buffer.dim() != 1 or buffer.element_size() != 1 or not buffer.is_contiguous():
            raise ValueError(f"the buffer must be flat bytes, found shape {tuple(buffer.shape)} of {buffer.dtype}")
        self._buffer = buffer.view(torch.uint8)
        self._values = list(values)
        self._layers = [_strips_of(layer, self._buffer) for layer in layers]
        self._layers_of = [[layer for layer in self._layers if layer.group == g] for g in range(len(values))]
        if window_bytes is None:
            window_bytes = _CPU_WINDOW_BYTES if buffer.device.type == "cpu" else _DEVICE_WINDOW_BYTES
        self._windows = _cut(self._buffer.numel(), window_bytes, self._layers)
        widest = max(window.high - window.low for window in self._windows)
        # Paint for any stretch that a window takes, wherever in the period it begins; a small buffer ends within one.
        num_paint_bytes = min(self._buffer.numel(), widest + _PAINT_PERIOD)
        self._paint = _paint_tile(self._values, num_paint_bytes, self._buffer.device)
        self._image = torch.empty(0, dtype=torch.uint8, device=buffer.device)
        self._widest = widest
        self._constants: dict[tuple[int, int], Tensor] = {}

    def paint(self) -> None:
        """Writes the pattern over all of the buffer."""
        for window in self._windows:
            self._buffer[window.start : window.stop].copy_(self._painted(window.start, window.stop))

    def verify(self, *requests: Sequence[Sequence[int]]) -> list[Written]:
        """Compares the buffer, painted before, with what fills of these blocks must have left.

        requests: block IDs per group, one argument per request in the order in which the worker serves them; one
        argument with the union over requests does as well where no byte is filled twice with different values. Groups
        and IDs that do not exist are ignored. Returns the blocks that were to be written, layer by layer, then what
        was written though nobody asked.
        """
        wanted = _union(requests, len(self._values))
        ledger = _Ledger(self._layers, self._values, wanted)
        for window in self._doubtful([_runs(ids) for ids in wanted]):
            image = self._expected(window, requests, ledger)
            actual = self._buffer[window.low : window.high]
            if not _same_bytes(actual[window.judged], image[window.judged]):
                self._classify(window, actual, image, ledger)
        return list(ledger.entries())

    def _doubtful(self, wanted: Sequence[Sequence[_Run]]) -> list[_Window]:
        """The windows that are not right at a glance, in order. wanted: runs of blocks by group."""
        doubtful: list[_Window] = []
        glanced: list[_Window] = []
        answers: list[Tensor] = []
        for window in self._windows:
            answer = self._glance(window, wanted)
            if answer is None:
                doubtful.append(window)
            else:
                glanced.append(window)
                answers.append(answer)
        # The one place that waits for the device.
        right = torch.stack(answers).tolist() if answers else []
        doubtful += [window for window, is_right in zip(glanced, right, strict=True) if not is_right]
        return sorted(doubtful)

    def _glance(self, window: _Window, wanted: Sequence[Sequence[_Run]]) -> Tensor | None:
        """Whether a window is right, as a tensor of one truth value; None where that takes a closer look."""
        strips = [(layer, strip) for layer in self._layers if wanted[layer.group] for strip in layer.strips]
        if not _is_plain(window, strips, self._values):
            return None
        most = _MOST_PIECES.get(self._buffer.device.type, _MOST_PIECES_ELSEWHERE)
        pieces = _pieces(window, strips, self._values, wanted, most)
        if pieces is not None:
            return torch.stack([self._holds(piece) for piece in pieces]).all()
        return self._matches(window, strips, wanted)

    def _matches(
        self, window: _Window, strips: Sequence[tuple[_Layer, _Strip]], wanted: Sequence[Sequence[_Run]]
    ) -> Tensor | None:
        """The same for any number of stretches: everything against paint, then the rows to be written against their
        constants. None where two groups write different values into one block."""
        if _collide(wanted, self._values):
            return None
        words = self._buffer[window.low : window.high].view(torch.int64)
        differs = words != self._painted(window.low, window.high).view(torch.int64)
        for layer, strip in strips:
            rows = _row_index(_ids(wanted[layer.group]), strip.blocks_in(window), words.device)
            if rows is not None:
                strip.word_rows(differs, window)[rows] = strip.word_rows(words, window)[rows] != self._word(layer.group)
        return ~differs[window.judged.start // _WORD : window.judged.stop // _WORD].any()

    def _word(self, group: int) -> int:
        """A group's constant, repeated to a word."""
        return _word(self._values[group].element)

    def _holds(self, piece: _Piece) -> Tensor:
        """Whether a stretch holds its constant, or paint, as a tensor of one truth value."""
        words = self._buffer[piece.start : piece.stop].view(torch.int64)
        if piece.element is None:
            return _all_equal(words, self._painted(piece.start, piece.stop).view(torch.int64))
        return (words == _word(piece.element)).all()

    def _painted(self, low: int, high: int) -> Tensor:
        """The pattern of bytes [low, high) of the buffer."""
        offset = low % _PAINT_PERIOD
        return self._paint[offset : offset + high - low]

    def _expected(self, window: _Window, requests: Sequence[Sequence[Sequence[int]]], ledger: _Ledger) -> Tensor:
        """The paint with every fill applied in order. Where values are drawn, what was drawn is taken over."""
        if not self._image.numel():
            self._image = torch.empty(self._widest, dtype=torch.uint8, device=self._buffer.device)
        image = self._image[: window.high - window.low]
        image.copy_(self._painted(window.low, window.high))
        for ids_by_group in requests:
            for layers, ids in zip(self._layers_of, ids_by_group, strict=False):
                rows_of: dict[tuple[int, int], Tensor | None] = {}  # layers of a group mostly share one geometry
                for layer in layers if ids else ():
                    for strip in layer.strips:
                        span = strip.blocks_in(window)
                        if span not in rows_of:
                            rows_of[span] = _row_index(ids, span, image.device)
                        rows = rows_of[span]
                        if rows is not None:
                            self._fill(layer, strip, window, image, rows, ledger)
        return image

    def _fill(self, layer: _Layer, strip: _Strip, window: _Window, image: Tensor, rows: Tensor, ledger: _Ledger) -> None:
        target = strip.rows(image, window)
        if not self._values[layer.group].is_random:
            target[rows] = self._constant(layer.group, strip.num_bytes)
            return
        drawn = strip.rows(self._buffer[window.low : window.high], window)[rows]
        paint = strip.rows(self._painted(window.low, window.high), window)[rows]
        ledger.note_drawn(layer, strip, window, rows, drawn, paint)
        target[rows] = drawn

    def _constant(self, group: int, num_bytes: int) -> Tensor:
        """A run of `num_bytes` bytes of the group's fill value."""
        run = self._constants.get((group, num_bytes))
        if run is None:
            element = torch.tensor(list(self._values[group].element), dtype=torch.uint8, device=self._buffer.device)
            run = self._constants[group, num_bytes] = element.repeat(num_bytes // element.numel())  # divides evenly
        return run

    def _classify(self, window: _Window, actual: Tensor, image: Tensor, ledger: _Ledger) -> None:
        """Sorts every differing byte of a window by owner: a selected block, else any layer's block, else padding."""
        differs = actual != image
        changed = actual != self._painted(window.low, window.high)
        selected = [
            (layer, strip, rows)
            for layer in self._layers
            for strip in layer.strips
            if (rows := _row_index(ledger.wanted[layer.group], strip.blocks_in(window), image.device)) is not None
        ]
        for layer, strip, rows in selected:
            ledger.note_selected(layer, strip, window, rows, actual, differs, changed)
        for _, strip, rows in selected:
            strip.rows(differs, window)[rows] = False
        for layer in self._layers:
            for strip in layer.strips:
                ledger.note_outside(layer, strip, window, actual, differs)
        ledger.note_padding(window, differs)


# ------------------------------------------------------------------------------------------------------------- geometry


class _Window(NamedTuple):
    """Bytes [start, stop) of the buffer are judged; bytes [low, high) are at hand."""

    low: int
    start: int
    stop: int
    high: int

    @property
    def judged(self) -> slice:
        return slice(self.start - self.low, self.stop - self.low)


class _Strip(NamedTuple):
    """A run of `num_bytes` contiguous bytes in every manager block: block b's begins at `first + b * stride`."""

    first: int
    stride: int
    num_bytes: int
    num_blocks: int

    def blocks_in(self, window: _Window) -> tuple[int, int]:
        """The range of blocks whose run lies whole inside the bytes at hand."""
        low = max(0, -((self.first - window.low) // self.stride))  # rounds up
        high = (window.high - self.first - self.num_bytes) // self.stride + 1  # floors: the last that ends in time
        return low, max(low, min(high, self.num_blocks))

    def stretches(self, run: _Run, window: _Window) -> Iterator[tuple[int, int]]:
        """The bytes of these blocks that the window judges, as (start, stop)."""
        before = (window.start - self.first - self.num_bytes) // self.stride  # floors: the last block before the window
        low = max(run.low, before + 1, 0)
        high = min(run.high, self.num_blocks, -((self.first - window.stop) // self.stride))  # rounds up
        if low < high and self.stride == self.num_bytes:
            yield max(self.first + low * self.stride, window.start), min(self.first + high * self.stride, window.stop)
            return
        for block_id in range(low, high):
            start = self.first + block_id * self.stride
            yield max(start, window.start), min(start + self.num_bytes, window.stop)

    def rows(self, at_hand: Tensor, window: _Window) -> Tensor:
        """The runs in a window's bytes as rows; row 0 is the first block of `blocks_in`."""
        low, high = self.blocks_in(window)
        begin = at_hand.storage_offset() + self.first + low * self.stride - window.low
        return at_hand.as_strided((high - low, self.num_bytes), (self.stride, 1), begin)

    def word_rows(self, words: Tensor, window: _Window) -> Tensor:
        """The same of a window's words, in a strip of whole words."""
        low, high = self.blocks_in(window)
        begin = words.storage_offset() + (self.first + low * self.stride - window.low) // _WORD  # divides evenly
        return words.as_strided((high - low, self.num_bytes // _WORD), (self.stride // _WORD, 1), begin)


class _Layer(NamedTuple):
    """A layer as strips: most layouts give one, those that put heads outside of blocks give one per head."""

    group: int
    name: str
    element_bytes: int
    num_blocks: int
    strips: tuple[_Strip, ...]


def _strips_of(layer: LayerView, buffer: Tensor) -> _Layer:
    """Dimensions that lie densely behind one another become one run; the offsets of the others are spelled out."""
    view, ratio, size = layer.view, layer.rows_per_block, layer.view.element_size()
    num_rows, num_blocks = view.shape[0], view.shape[0] // ratio  # divides evenly, or is refused
    if num_blocks * ratio != num_rows:
        raise ValueError(f"layer {layer.name}: {num_rows} rows do not make whole blocks of {ratio} rows")
    row_stride = view.stride(0) * size
    dims = [(ratio, row_stride)]
    dims += [(count, stride * size) for count, stride in zip(view.shape[1:], view.stride()[1:], strict=True)]
    run, loops = size, []
    for count, stride in sorted((dim for dim in dims if dim[0] > 1), key=lambda dim: dim[1]):
        if stride == run:
            run *= count
        else:
            loops.append(range(0, count * stride, stride))
    first, block_stride = view.data_ptr() - buffer.data_ptr(), row_stride * ratio
    offsets = sorted(sum(place) for place in product(*loops))
    last = first + (num_blocks - 1) * block_stride + offsets[-1] + run
    if first < 0 or last > buffer.numel():
        raise ValueError(f"layer {layer.name}: bytes [{first}, {last}) lie outside a buffer of {buffer.numel()} bytes")
    strips = tuple(_Strip(first + offset, block_stride, run, num_blocks) for offset in offsets)
    return _Layer(layer.group, layer.name, size, num_blocks, strips)


def _cut(num_bytes: int, window_bytes: int, layers: Sequence[_Layer]) -> list[_Window]:
    if num_bytes <= window_bytes:
        return [_Window(0, 0, num_bytes, num_bytes)]
    margin = max((strip.num_bytes for layer in layers for strip in layer.strips), default=0)
    margin, window_bytes = (-(-size // _WORD) * _WORD for size in (margin, window_bytes))  # round up
    starts = range(0, num_bytes, window_bytes)
    stops = [min(start + window_bytes, num_bytes) for start in starts]
    return [
        _Window(max(start - margin, 0), start, stop, min(stop + margin, num_bytes))
        for start, stop in zip(starts, stops, strict=True)
    ]


class _Run(NamedTuple):
    """Blocks [low, high)."""

    low: int
    high: int


class _Piece(NamedTuple):
    """Bytes [start, stop) of the buffer that must hold this element throughout, or paint where it is None."""

    start: int
    stop: int
    element: bytes | None


def _runs(ids: Sequence[int]) -> list[_Run]:
    """Block IDs as runs, in ascending order."""
    runs: list[_Run] = []
    for block_id in sorted(set(ids)):
        if runs and runs[-1].high == block_id:
            runs[-1] = _Run(runs[-1].low, block_id + 1)
        else:
            runs.append(_Run(block_id, block_id + 1))
    return runs


def _ids(runs: Sequence[_Run]) -> list[int]:
    """Every block of the runs."""
    return [block_id for run in runs for block_id in range(run.low, run.high)]


@lru_cache(maxsize=32)
def _word(element: bytes) -> int:
    """An element repeated to a word, as the number that a word of such memory is."""
    return int.from_bytes(element * (_WORD // len(element)), sys.byteorder, signed=True)  # divides evenly


def _is_plain(window: _Window, strips: Sequence[tuple[_Layer, _Strip]], values: Sequence[FillValue]) -> bool:
    """Whether everything in sight is whole words, and every value a constant."""
    return not (
        window.high % _WORD
        or any(values[layer.group].is_random for layer, _ in strips)
        or any(size % _WORD for _, strip in strips for size in (strip.first, strip.stride, strip.num_bytes))
    )


def _collide(wanted: Sequence[Sequence[_Run]], values: Sequence[FillValue]) -> bool:
    """Whether a block is to be written with different values: groups share storage, block by block."""
    by_element: dict[bytes, set[int]] = {}
    for runs, value in zip(wanted, values, strict=True):
        by_element.setdefault(value.element, set()).update(_ids(runs))
    seen: set[int] = set()
    for ids in by_element.values():
        if seen & ids:
            return True
        seen |= ids
    return False


def _pieces(
    window: _Window,
    strips: Sequence[tuple[_Layer, _Strip]],
    values: Sequence[FillValue],
    wanted: Sequence[Sequence[_Run]],
    most: int,
) -> list[_Piece] | None:
    """A window's judged bytes as stretches of paint and of constants; None where they are more than `most`, or where
    different values are to be written to the same bytes."""
    filled: list[_Piece] = []
    for layer, strip in strips:
        for run in wanted[layer.group]:
            for start, stop in strip.stretches(run, window):
                filled.append(_Piece(start, stop, values[layer.group].element))
                if len(filled) > most:
                    return None
    pieces: list[_Piece] = []
    position = window.start
    for piece in sorted(filled, key=lambda piece: piece[:2]):
        if piece.start < position and pieces[-1].element != piece.element:
            return None
        if piece.start > position:
            pieces.append(_Piece(position, piece.start, None))
        if piece.stop > position:
            pieces.append(_Piece(max(piece.start, position), piece.stop, piece.element))
            position = piece.stop
    if position < window.stop:
        pieces.append(_Piece(position, window.stop, None))
    return pieces


def _row_index(ids: Sequence[int], span: tuple[int, int], device: torch.device) -> Tensor | None:
    """Row numbers of those blocks that lie in a range of blocks, or None if none does."""
    low, high = span
    rows = [block_id - low for block_id in ids if low <= block_id < high]
    return torch.tensor(rows, device=device) if rows else None


def _same_bytes(actual: Tensor, image: Tensor) -> bool:
    """Whether two stretches of bytes are equal; word by word where they lie on words, which is much faster."""
    whole = actual.numel() // _WORD * _WORD  # floors
    if actual.storage_offset() % _WORD or image.storage_offset() % _WORD or not whole:
        return torch.equal(actual, image)
    words = (stretch[:whole].view(torch.int64) for stretch in (actual, image))
    return torch.equal(*words) and torch.equal(actual[whole:], image[whole:])


def _all_equal(words: Tensor, others: Tensor) -> Tensor:
    """One truth value, left on the device: fetching it would wait for all work before."""
    if words.device.type == "cpu":
        return torch.tensor(torch.equal(words, others))
    return (words == others).all()


def _paint_tile(values: Sequence[FillValue], num_bytes: int, device: torch.device) -> Tensor:
    """At least `num_bytes` of paint, in whole periods."""
    if any(value.is_random for value in values):
        period = _period(_NAN_BYTES, device)
    else:
        written = {byte for value in values for byte in value.element}
        period = _period(tuple(byte for byte in _SMALL_BYTES if byte not in written), device)
    copies = -(-num_bytes // _PAINT_PERIOD)  # rounds up
    return period if copies == 1 else period.repeat(copies)


@lru_cache(maxsize=32)
def _period(alphabet: tuple[int, ...], device: torch.device) -> Tensor:
    """One period of paint: bytes of the alphabet in a fixed order without a pattern."""
    generator = torch.Generator().manual_seed(1)
    order = torch.randint(len(alphabet), (_PAINT_PERIOD,), generator=generator)
    return torch.tensor(alphabet, dtype=torch.uint8)[order].to(device)


def _union(requests: Iterable[Sequence[Sequence[int]]], num_groups: int) -> list[list[int]]:
    """Every request's blocks per group, in order, each once."""
    wanted: list[dict[int, None]] = [{} for _ in range(num_groups)]
    for ids_by_group in requests:
        for blocks, ids in zip(wanted, ids_by_group, strict=False):
            blocks.update(dict.fromkeys(ids))
    return [list(ids) for ids in wanted]


# ---------------------------------------------------------------------------------------------------------- bookkeeping


class _Note(NamedTuple):
    """What is wrong with one run of one block. `value` is the constant element it holds, if it holds one."""

    state: Literal["unwritten", "wrong_value", "outside"]
    num_bytes: int
    value: str | None


class _Moments:
    """Count, sum and sum of squares of drawn numbers."""

    def __init__(self) -> None:
        self.count = 0
        self._sum = 0.0
        self._squares = 0.0

    def add(self, numbers: Tensor) -> None:
        wide = numbers.double()
        self.count += wide.numel()
        self._sum += float(wide.sum())
        self._squares += float((wide * wide).sum())

    @property
    def mean(self) -> float:
        return self._sum / self.count

    @property
    def std(self) -> float:
        return float(max(self._squares / self.count - self.mean**2, 0.0) ** 0.5)


class _Ledger:
    """Collects what the windows show, and writes it down per layer. A run seen from two windows is noted once."""

    def __init__(self, layers: Sequence[_Layer], values: Sequence[FillValue], wanted: list[list[int]]) -> None:
        self.wanted = wanted
        self._layers = layers
        self._values = values
        self._faults: dict[str, dict[tuple[int, _Strip], _Note]] = {}
        self._outside: dict[str, dict[tuple[int, _Strip], _Note]] = {}
        self._moments: dict[str, _Moments] = {}
        self._num_padding_bytes = 0
        self._padding_blocks: set[int] = set()

    def note_drawn(self, layer: _Layer, strip: _Strip, window: _Window, rows: Tensor, drawn: Tensor, paint: Tensor) -> None:
        """Drawn elements must all differ from the paint and be finite; their moments are kept."""
        numbers = drawn.view(_TORCH_DTYPES[self._values[layer.group].dtype]).float()
        unchanged = (drawn == paint).view(*numbers.shape, -1).all(dim=-1)
        faulty = unchanged | ~numbers.isfinite()
        begins = (rows + strip.blocks_in(window)[0]) * strip.stride + strip.first
        own = (begins >= window.start) & (begins < window.stop)  # a run seen from two windows counts once
        if bool(own.any()):
            self._moments.setdefault(layer.name, _Moments()).add(numbers[own])
        if bool(faulty.any()):
            self._note(self._faults, layer, strip, window, rows, drawn, faulty, ~unchanged & faulty)

    def note_selected(
        self,
        layer: _Layer,
        strip: _Strip,
        window: _Window,
        rows: Tensor,
        actual: Tensor,
        differs: Tensor,
        changed: Tensor,
    ) -> None:
        """Differing bytes in blocks that were to be written."""
        wrong = strip.rows(differs, window)[rows]
        if bool(wrong.any()):
            actual, changed = (strip.rows(bytes_, window)[rows] for bytes_ in (actual, changed))
            self._note(self._faults, layer, strip, window, rows, actual, wrong, wrong & changed)

    def note_outside(self, layer: _Layer, strip: _Strip, window: _Window, actual: Tensor, differs: Tensor) -> None:
        """Differing bytes of a layer in blocks nobody asked for; they are taken out of `differs`."""
        wrong = strip.rows(differs, window)
        rows = wrong.any(dim=1).nonzero().flatten()
        if rows.numel():
            wrong_rows = wrong[rows]
            self._note(self._outside, layer, strip, window, rows, strip.rows(actual, window)[rows], wrong_rows, None)
            wrong[rows] = False

    def note_padding(self, window: _Window, differs: Tensor) -> None:
        """Differing bytes that no layer's view covers."""
        stray = differs[window.judged].nonzero().flatten().tolist()
        self._num_padding_bytes += len(stray)
        for offset in stray:
            self._padding_blocks.update(self._page(window.start + offset))

    def _page(self, offset: int) -> Iterator[int]:
        """The block in whose page a byte lies, by the layer whose run begins closest before it."""
        strips = [strip for layer in self._layers for strip in layer.strips if strip.first <= offset]
        if strips:
            strip = min(strips, key=lambda strip: (offset - strip.first) % strip.stride)
            block_id = (offset - strip.first) // strip.stride  # floors
            if block_id < strip.num_blocks:
                yield block_id

    def _note(
        self,
        notes: dict[str, dict[tuple[int, _Strip], _Note]],
        layer: _Layer,
        strip: _Strip,
        window: _Window,
        rows: Tensor,
        actual: Tensor,
        wrong: Tensor,
        overwritten: Tensor | None,
    ) -> None:
        """Writes down the rows that have wrong elements. `overwritten` None: nobody asked for these blocks."""
        low, _ = strip.blocks_in(window)
        scale = actual.shape[1] // wrong.shape[1]  # bytes per element of the mask; divides evenly
        num_wrong = (wrong.sum(dim=1) * scale).tolist()
        written = overwritten.any(dim=1).tolist() if overwritten is not None else []
        noted = notes.setdefault(layer.name, {})
        for i, row in enumerate(rows.tolist()):
            if num_wrong[i]:
                state: Literal["unwritten", "wrong_value", "outside"] = "outside"
                if overwritten is not None:
                    state = "wrong_value" if written[i] else "unwritten"
                value = None if state == "unwritten" else _constant_element(actual[i], layer.element_bytes)
                noted[low + row, strip] = _Note(state, num_wrong[i], value)

    def entries(self) -> Iterator[Written]:
        """The verdicts: blocks that were to be written, layer by layer, then blocks and bytes that were not."""
        for layer in self._layers:
            ids = [block_id for block_id in self.wanted[layer.group] if 0 <= block_id < layer.num_blocks]
            faults = _per_block(self._faults.get(layer.name, {}))
            good = [block_id for block_id in ids if block_id not in faults] if faults else ids
            if good:
                yield self._filled(layer, good)
            yield from _grouped(layer, faults)
        for layer in self._layers:
            yield from _grouped(layer, _per_block(self._outside.get(layer.name, {})))
        if self._num_padding_bytes:
            blocks = sorted(self._padding_blocks)
            yield Written(NO_GROUP, "", blocks, "padding", num_bytes=self._num_padding_bytes)

    def _filled(self, layer: _Layer, ids: list[int]) -> Written:
        num_bytes = len(ids) * sum(strip.num_bytes for strip in layer.strips)
        value = self._values[layer.group]
        if not value.is_random:
            return Written(layer.group, layer.name, ids, "filled", value.element.hex(), num_bytes)
        moments = self._moments[layer.name]
        return Written(layer.group, layer.name, ids, "filled", None, num_bytes, moments.mean, moments.std)


def _constant_element(run: Tensor, element_bytes: int) -> str | None:
    """The element that a run repeats, in hex, or None."""
    elements = run.view(-1, element_bytes)
    return bytes(elements[0].tolist()).hex() if bool((elements == elements[0]).all()) else None


def _per_block(notes: dict[tuple[int, _Strip], _Note]) -> dict[int, _Note]:
    """One note per block: the worst state over its runs."""
    blocks: dict[int, _Note] = {}
    for (block_id, _), note in notes.items():
        seen = blocks.get(block_id)
        if seen is not None:
            state = "wrong_value" if "wrong_value" in (seen.state, note.state) else note.state
            note = _Note(state, seen.num_bytes + note.num_bytes, note.value if note.value == seen.value else None)
        blocks[block_id] = note
    return blocks


def _grouped(layer: _Layer, blocks: dict[int, _Note]) -> Iterator[Written]:
    """Blocks of one layer with equal state and value make one entry."""
    alike: dict[tuple[str, str | None], list[int]] = {}
    for block_id in sorted(blocks):
        alike.setdefault((blocks[block_id].state, blocks[block_id].value), []).append(block_id)
    for (_, value), ids in alike.items():
        num_bytes = sum(blocks[block_id].num_bytes for block_id in ids)
        yield Written(layer.group, layer.name, ids, blocks[ids[0]].state, value, num_bytes)
