"""Drafters of trees, as the tests of the decoder put them together."""

import random

import torch

from evaluation.decoder.drafters import Draft, DraftModel, DraftState
from evaluation.decoder.engine import Decoder
from evaluation.decoder.kinds import make_tree_drafter
from evaluation.decoder.tree import DraftTree
from tests.evaluation.decoder.decoders import GREEDY, decoder
from tests.evaluation.decoder.tiny_models import VOCAB

Nodes = list[tuple[int, int]]
"""(column of the parent, id) of every node, in order of depth."""


def tree(*rows: Nodes, proposed: list[int] | None = None) -> DraftTree:
    """A tree per row; shorter ones are filled up with nodes that are not proposed."""
    width = max(map(len, rows))
    full = [[*row, *[(0, 0)] * (width - len(row))] for row in rows]
    parents, ids = (torch.tensor([[node[i] for node in row] for row in full]) for i in (0, 1))
    return DraftTree(ids, torch.tensor(proposed or [len(row) for row in rows]), None, parents)


def prices(node: float = 0.05, most: int = 10) -> list[float]:
    """Of trees in which each node has the same price."""
    return [node * nodes for nodes in range(most + 1)]


def tree_decoder(
    target, draft, count=4, batch=4, options=GREEDY, vocab=None, *, node=0.05, most=10, stop_below=0.1,
    rates=None, **settings,
) -> Decoder:  # fmt: skip
    """A decoder whose drafts are trees that `draft` grows, a model or a `DraftModel` of any kind."""
    engine = decoder(target, "ngram", count, batch, options, **settings)
    own = draft if isinstance(draft, DraftModel) else DraftModel(draft, vocab)
    engine.drafter = make_tree_drafter(
        own, engine.runner, options, prices(node, most), rates, stop_below=stop_below
    )
    return engine


class RandomTrees:
    """Random trees of random ids, in which some path mostly begins as the text of the row's seed goes on."""

    capturable = follows = False

    def __init__(self, texts: list[list[int]], nodes: int = 9) -> None:
        self.texts, self.nodes = texts, nodes

    def start(self, row: int) -> None:
        """It keeps nothing."""

    def move(self, source: int, destination: int) -> None:
        """It keeps nothing."""

    def prepare(self, state: DraftState, count: int) -> None:
        """It keeps nothing."""

    def draft(self, state: DraftState, count: int) -> Draft:
        if count == 0:
            return Draft.none(state.position)
        rows = [
            self.grow(random.Random(f"{seed}, {place}"), self.texts[seed][place + 1 :], count)
            for seed, place in zip(state.draws.seeds.tolist(), state.position.tolist(), strict=True)
        ]
        return tree(*rows)

    def grow(self, chance: random.Random, future: list[int], count: int) -> Nodes:
        nodes: Nodes = []
        level, right = [0], 0  # the columns of one depth, and which of them is on the right path
        for depth in range(count):
            fewest = 1 if depth == 0 else 0
            children = [
                (parent, chance.randrange(VOCAB))
                for parent in level
                for _ in range(chance.randint(fewest, 3))
            ]
            first = len(nodes)
            nodes += children[: self.nodes - first]
            level = list(range(first + 1, len(nodes) + 1))
            own = [column for column in level if nodes[column - 1][0] == right]
            right = chance.choice(own) if own and depth < len(future) else -1
            if right > 0:
                nodes[right - 1] = (nodes[right - 1][0], future[depth])
        return nodes
