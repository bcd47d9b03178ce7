"""The tree of blocks against a search through all sequences."""

from __future__ import annotations

import random

import numpy as np
import pytest

from moeinf.runtime.prefix.tree import BLOCK, Tree

ROOT = bytes(16)


def add(tree: Tree, ids: list[int]) -> None:
    node, tokens = tree.root, np.asarray(ids, np.int32)
    for start in range(0, len(ids), BLOCK):
        block = tokens[start : start + BLOCK]
        node = tree.child(node, block, False) or tree.add(node, block, False, 1)


def common(a: list[int], b: list[int]) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


@pytest.mark.parametrize("seed", range(5))
def test_the_longest_common_prefix(seed: int) -> None:
    """Sequences branch at any place, within a block and at its border."""
    rng, tree, known = random.Random(seed), Tree(ROOT), list[list[int]]()
    for _ in range(40):
        begun = rng.choice(known) if known and rng.random() < 0.8 else []
        cut = rng.choice([rng.randint(0, len(begun)), len(begun) // BLOCK * BLOCK])
        known.append(begun[:cut] + [rng.randint(0, 3) for _ in range(rng.randint(1, 700))])
        add(tree, known[-1])
    for _ in range(60):
        base = rng.choice(known)
        asked = base[: rng.randint(0, len(base))] + [rng.randint(0, 3) for _ in range(5)]
        best = max(common(asked, one) for one in known)
        found = tree.match(asked, whole=False, snapshots=False)
        assert found.tokens == best
        held = [token for node in found.path for token in node.tokens.tolist()]
        assert held[:best] == asked[:best]
        whole = tree.match(asked, whole=True, snapshots=False)
        ends = [common(asked, one) for one in known]
        assert whole.tokens % BLOCK == 0 or whole.tokens in [len(one) for one in known]
        assert whole.tokens >= max(ends) // BLOCK * BLOCK


def test_a_snapshot_is_the_only_way_to_go_on() -> None:
    tree = Tree(ROOT)
    ids = np.arange(2 * BLOCK, dtype=np.int32)
    first = tree.add(tree.root, ids[:BLOCK], False, 1)
    tree.add(tree.root, ids[:100], True, 1)
    assert tree.match(ids.tolist(), whole=False, snapshots=True).tokens == 100
    tree.add(first, ids[BLOCK : BLOCK + 64], True, 1)
    found = tree.match(ids.tolist(), whole=False, snapshots=True)
    assert (found.tokens, len(found.path)) == (BLOCK + 64, 2)
    assert tree.match(ids[: BLOCK + 63].tolist(), whole=False, snapshots=True).tokens == 100


def test_a_removed_node_takes_all_below_it() -> None:
    tree = Tree(ROOT)
    add(tree, list(range(1000)))
    first = next(iter(tree.root.children.values()))
    assert len(tree.remove(first)) == 4
    assert not tree.nodes
    assert tree.match(list(range(1000)), whole=False, snapshots=False).tokens == 0
