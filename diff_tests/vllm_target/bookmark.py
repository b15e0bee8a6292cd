"""Where a child is among the cases of a campaign: a page of memory that it shares with its parent.

A message a case would be read by nobody but for the last: the parent asks only when the child is dead or silent.
"""

from __future__ import annotations

import mmap
import os
import struct
import time

_PLACE = struct.Struct("=qqd")


class Bookmark:
    """One end of the page. It holds the number of a question (`wire.RunCases`), the index of the case that the child has
    turned to, and when it did so, by the clock that all processes share."""

    def __init__(self, fd: int) -> None:
        self._page = mmap.mmap(fd, mmap.PAGESIZE)

    def put(self, question: int, index: int) -> None:
        """The child turns to the index-th case now."""
        _PLACE.pack_into(self._page, 0, question, index, time.monotonic())

    def index(self, question: int) -> int | None:
        """The case that the child has turned to; None if it has not come to this question yet."""
        asked, index, turned_at = _PLACE.unpack_from(self._page)
        return index if asked == question and turned_at else None

    @property
    def turned_at(self) -> float:
        """When the child turned to its case; 0 if it never had one."""
        turned_at: float = _PLACE.unpack_from(self._page)[2]
        return turned_at


def shared_page() -> int:
    """A descriptor of an empty page, for a bookmark at each end."""
    fd = os.memfd_create("kvoracle-bookmark")
    os.truncate(fd, mmap.PAGESIZE)
    return fd
