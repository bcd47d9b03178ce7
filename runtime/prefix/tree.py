"""Find the longest common prefix of a prompt among sequences of tokens: a radix tree of blocks.

A node holds up to BLOCK tokens, and begins at a multiple of BLOCK. Only full nodes have children,
and snapshots have none. So sequences share their full blocks, and a node is never divided: a prompt
may use its first tokens alone. A node's key is a digest of all tokens up to its last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from moeinf.runtime.config import PREFILL_CHUNK

BLOCK = PREFILL_CHUNK
KEY_BYTES = 16


@dataclass(eq=False)
class Node:
    """Some tokens of a text, with the KV cache's bytes for them in RAM, on disk or both.

    snapshot: the bytes include the memory of recurrent layers after the last token.
    """

    parent: Node | None
    tokens: NDArray[np.int32]
    key: bytes
    snapshot: bool = False
    size_bytes: int = 0
    start: int = 0  # tokens before it
    data: Tensor | None = None
    on_disk: bool = False
    used: int = 0  # a larger number is a later use
    children: dict[bytes, Node] = field(default_factory=dict)

    @property
    def end(self) -> int:
        """Tokens up to its last one."""
        return self.start + len(self.tokens)

    @property
    def path(self) -> list[Node]:
        """The nodes from the first tokens of the text to this one."""
        found: list[Node] = []
        node: Node | None = self
        while node is not None and node.parent is not None:
            found.append(node)
            node = node.parent
        return found[::-1]


@dataclass(frozen=True)
class Match:
    """A prefix of a prompt that a tree has.

    path: its nodes. tokens: of the prompt, maybe not all of the last node's.
    """

    path: tuple[Node, ...] = ()
    tokens: int = 0


def key_of(parent: bytes, tokens: NDArray[np.int32], snapshot: bool) -> bytes:
    """Return the key of a node below the node with the key `parent`."""
    kind = b"s" if snapshot else b"c"
    return blake2b(parent + kind + tokens.astype("<i4").tobytes(), digest_size=KEY_BYTES).digest()


class Tree:
    """Nodes below a root, whose key says which model and which arithmetic they are of."""

    def __init__(self, root: bytes) -> None:
        self.root = Node(None, np.empty(0, np.int32), root)
        self.nodes: dict[bytes, Node] = {}

    def child(self, parent: Node, tokens: NDArray[np.int32], snapshot: bool) -> Node | None:
        return parent.children.get(key_of(parent.key, tokens, snapshot))

    def add(self, parent: Node, tokens: NDArray[np.int32], snapshot: bool, size_bytes: int) -> Node:
        """Add a node without bytes below a full one."""
        key = key_of(parent.key, tokens, snapshot)
        node = Node(parent, tokens.copy(), key, snapshot, size_bytes, parent.end)
        parent.children[key] = self.nodes[key] = node
        return node

    def remove(self, node: Node) -> list[Node]:
        """Remove a node and all below it; return them."""
        removed = [node]
        for one in removed:
            removed += one.children.values()
            self.nodes.pop(one.key, None)
        if node.parent is not None:
            node.parent.children.pop(node.key, None)
        return removed

    def match(self, ids: Sequence[int], whole: bool, snapshots: bool) -> Match:
        """Return the longest prefix of `ids` that can be taken over.

        whole: of full nodes alone. snapshots: up to a snapshot.
        """
        asked = np.asarray(ids, np.int32)
        node, path, best = self.root, list[Node](), Match()
        while True:
            rest, following = asked[node.end :], None
            for child in node.children.values():
                same = _common(child.tokens, rest)
                full = same == len(child.tokens)
                if full and same == BLOCK and not child.snapshot:
                    following = child
                usable = (full and child.snapshot) if snapshots else full or not whole
                if usable and node.end + same > best.tokens:
                    best = Match((*path, child), node.end + same)
            if following is None:
                return best
            path.append(following)
            node = following


def _common(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    """Return the number of equal first tokens."""
    count = min(len(a), len(b))
    different = a[:count] != b[:count]
    return int(different.argmax()) if different.any() else count
