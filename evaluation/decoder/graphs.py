"""CUDA graphs: a round's thousands of kernels, launched by one call."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class Graphs(Generic[T]):
    """Plays functions over fixed buffers as CUDA graphs, one per key.

    The first call of a key runs the function itself, a round like any other, in which libraries set
    themselves up; the second captures it, and from then on it is replayed. What it returns lies in the
    graph's own memory and is overwritten by the next call, of any key.
    """

    def __init__(self) -> None:
        self.seen: set[Hashable] = set()
        self.graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, T]] = {}
        self.pool = torch.cuda.graph_pool_handle()  # one for all: no two play at once

    def __call__(self, key: Hashable, function: Callable[[], T]) -> T:
        if key not in self.seen:
            self.seen.add(key)
            return function()
        if key not in self.graphs:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.pool):
                results = function()
            self.graphs[key] = graph, results
        graph, results = self.graphs[key]
        graph.replay()
        return results
