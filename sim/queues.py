"""Waiting queues: first come first served, or by priority."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Protocol

from sim.request import Request


class WaitingQueue(Protocol):
    """A queue of waiting requests with one head."""

    def push(self, request: Request) -> None:
        """A request arrives."""

    def put_back(self, requests: Iterable[Request]) -> None:
        """Requests return to the front, in this order."""

    def head(self) -> Request:
        """The request to be looked at next. Raises IndexError if there is none."""

    def pop(self) -> Request:
        """Takes the head out."""

    def remove(self, request: Request) -> None:
        """Takes any request out. Raises ValueError if it is not there."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...


class FifoQueue:
    """First come, first served; who returns goes to the front."""

    def __init__(self) -> None:
        self._requests: deque[Request] = deque()
        self.push = self._requests.append
        self.pop = self._requests.popleft
        self.remove = self._requests.remove

    def put_back(self, requests: Iterable[Request]) -> None:
        self._requests.extendleft(reversed(list(requests)))

    def head(self) -> Request:
        return self._requests[0]

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)


def rank(request: Request) -> tuple[int, int, str]:
    """Lower goes first."""
    return request.priority, request.arrival, request.id


class PriorityQueue:
    """Lowest priority number first, then who came first."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int, str], Request]] = []

    def push(self, request: Request) -> None:
        heapq.heappush(self._heap, (rank(request), request))

    def put_back(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.push(request)

    def head(self) -> Request:
        return self._heap[0][1]

    def pop(self) -> Request:
        return heapq.heappop(self._heap)[1]

    def remove(self, request: Request) -> None:
        self._heap.remove((rank(request), request))
        heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Request]:
        return (request for _, request in sorted(self._heap))
