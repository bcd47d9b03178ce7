"""Keep the KV of ended requests: in RAM by a budget, then on disk, written behind.

The engine's thread finds, restores and keeps. Another thread writes nodes to disk, only while no
request runs. RAM loses first what the disk has, then the leaves that were used least recently.

Threads read nodes straight into a state's columns. New memory costs more than the read: so a node
that was on disk at the start gets its place in RAM when it is used a second time.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moeinf.errors import reason
from moeinf.models.layers.kv_cache import CacheLayout, KvCache
from moeinf.runtime.prefix.columns import (
    buffer_bytes,
    copied_out,
    copy_in,
    copy_memory,
    parts_of,
    parts_of_buffer,
)
from moeinf.runtime.prefix.folder import Abandoned, BadFile, PrefixFolder, full_words
from moeinf.runtime.prefix.tree import BLOCK, Match, Node, Tree

_READERS = 4  # one alone leaves the drive idle while it checks and copies
_NEVER = float("inf")
_LAST_WRITES_S = 2.0  # for what is not written yet when the engine closes


@dataclass
class PrefixStats:
    """Counters since the engine was opened."""

    restored: int = 0  # tokens put back into a state
    bytes_read: int = 0  # from disk
    bytes_written: int = 0


class PrefixCache:
    """KV by prefix. One thread uses it; others may call `held`, and read `stats` and sizes."""

    def __init__(
        self,
        layout: CacheLayout,
        root: bytes,
        memory_bytes: int,
        reproducible: bool,
        folder: PrefixFolder | None,
        note: Callable[[str], None],
    ) -> None:
        """Read which nodes are on disk, and start the writer. root: see Tree."""
        self.stats, self.memory_bytes = PrefixStats(), memory_bytes
        self._layout, self._reproducible, self._note = layout, reproducible, note
        self._tree, self._folder = Tree(root), folder
        self.bytes_used, self._clock = 0, 0
        self._changed = threading.Condition(threading.RLock())
        self._queue: deque[Node] = deque()
        self._writing: Node | None = None
        self._running, self._close_at = 0, _NEVER
        self._readers: ThreadPoolExecutor | None = None
        self._writer: threading.Thread | None = None
        if folder is not None:
            self._index(folder)
            self._writer = threading.Thread(target=self._write, name="prefixes", daemon=True)
            self._writer.start()

    @property
    def disk_bytes(self) -> int:
        return 0 if self._folder is None else self._folder.bytes_used

    def begin(self) -> None:
        """Note that a request runs: nothing is written until it ends."""
        with self._changed:
            self._running += 1

    def end(self) -> None:
        """Note that a request has ended."""
        with self._changed:
            self._running -= 1
            self._changed.notify_all()

    def find(self, prompt: Sequence[int]) -> Match:
        """Return the longest known prefix of a prompt; its last token is always computed."""
        with self._changed:
            return self._tree.match(
                prompt[:-1], self._reproducible, self._layout.recurrent is not None
            )

    def held(self, keys: Iterable[bytes]) -> set[bytes]:
        """Return those keys whose nodes are in RAM or on disk. Other threads may call this."""
        with self._changed:
            return self._tree.nodes.keys() & set(keys)

    def restore(self, state: KvCache, match: Match) -> int:
        """Put a prefix into a state that already has the first `state.length` of its tokens.

        Returns the tokens that the state then has. They are fewer if a file cannot be read.
        """
        at = 0 if self._layout.recurrent else state.length // BLOCK
        path, length = match.path[at:], state.length
        with self._changed:
            again = [node.used > 0 for node in path]
            self._use(match.path)
        if self._readers is None:
            self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="prefix")
        counts = [min(node.end, match.tokens) - node.start for node in path]
        jobs = [
            self._readers.submit(self._bring, state, node, count, match.path if seen else None)
            for node, count, seen in zip(path, counts, again, strict=True)
        ]
        try:
            for node, count, job in zip(path, counts, jobs, strict=True):
                try:
                    data = job.result()
                except (OSError, BadFile) as error:
                    self._lose(node, error)
                    break
                if data is not None and node.snapshot:
                    copy_memory(data, state.resume(node.end))
                elif self._layout.recurrent is None:
                    state.resume(node.start + count)
        finally:
            for job in jobs:
                job.cancel()
            wait(jobs)  # they write into the state
        self.stats.restored += state.length - length
        if self._folder is not None:
            self._folder.touch([node for node in match.path if node.on_disk])
        return state.length

    def keep(self, state: KvCache, ids: Sequence[int]) -> None:
        """Keep the first tokens of a state, whose ids are given."""
        tokens = np.asarray(ids, np.int32)
        cuts = state.cuts or ()
        with self._changed:
            node = self._tree.root
            for start in range(0, len(tokens), BLOCK):
                block = tokens[start : start + BLOCK]
                for cut in cuts:
                    if start < cut <= start + len(block):
                        self._kept(state, node, block[: cut - start], snapshot=True)
                if len(block) < BLOCK and (self._reproducible or cuts):
                    break
                found = self._kept(state, node, block, snapshot=False)
                if found is None:
                    break
                node = found
            self._changed.notify_all()

    def close(self) -> None:
        """Write what can be written within two seconds, and end the writer."""
        with self._changed:
            self._close_at = time.monotonic() + _LAST_WRITES_S
            self._changed.notify_all()
        if self._writer is not None:
            self._writer.join(2 * _LAST_WRITES_S)
        if self._readers is not None:
            self._readers.shutdown()
        with self._changed:
            self._tree = Tree(self._tree.root.key)
            self._queue.clear()
            self.bytes_used = 0

    def _index(self, folder: PrefixFolder) -> None:
        """Add the nodes on disk whose parents are there, too."""
        for key, header in folder.scan():
            parent = self._tree.nodes.get(bytes.fromhex(header.parent), self._tree.root)
            stop = header.start + len(header.tokens)
            size = buffer_bytes(self._layout, header.start, stop, header.snapshot)
            if header.start != parent.end or parent.key.hex() != header.parent:
                continue
            if header.size_bytes != size or (parent.tokens.size % BLOCK):
                continue
            tokens = np.asarray(header.tokens, np.int32)
            node = self._tree.add(parent, tokens, header.snapshot, size)
            assert node.key == key
            node.on_disk = True

    def _kept(
        self, state: KvCache, parent: Node, tokens: np.ndarray, snapshot: bool
    ) -> Node | None:
        """Return the node for these tokens, with its bytes; None if there is no room for it."""
        found = self._tree.child(parent, tokens, snapshot)
        if found is not None:
            self._use((found,))
            return found
        stop = parent.end + len(tokens)
        size = buffer_bytes(self._layout, parent.end, stop, snapshot)
        if not self._make_room(size, parent.path):
            return None
        if not snapshot:
            self._drop_beginnings(parent, tokens)
        data = copied_out(state, parent.end, stop, snapshot)
        node = self._tree.add(parent, tokens, snapshot, size)
        node.data = data
        self.bytes_used += size
        self._use((node,))
        if self._folder is not None:
            self._queue.append(node)
        return node

    def _drop_beginnings(self, parent: Node, tokens: np.ndarray) -> None:
        """Remove the nodes whose tokens are the first of these."""
        for child in list(parent.children.values()):
            shorter = len(child.tokens) < len(tokens) and not child.snapshot
            if shorter and np.array_equal(child.tokens, tokens[: len(child.tokens)]):
                self._forget(child)

    def _use(self, nodes: Sequence[Node]) -> None:
        for node in reversed(nodes):
            self._clock += 1
            node.used = self._clock

    def _make_room(self, size_bytes: int, kept: Sequence[Node]) -> bool:
        """Release RAM until so many bytes fit; False if they cannot."""
        if size_bytes > self.memory_bytes:
            return False
        stays = {id(node) for node in kept} | {id(self._writing)}
        while self.bytes_used + size_bytes > self.memory_bytes:
            held = [
                n for n in self._tree.nodes.values() if n.data is not None and id(n) not in stays
            ]
            written = [node for node in held if node.on_disk]
            leaves = [node for node in held if not (node.on_disk or node.children)]
            if not (written or leaves):
                return False
            oldest = min(written or leaves, key=lambda node: node.used)
            if oldest.on_disk:
                self._release(oldest)
            else:
                self._forget(oldest)
        return True

    def _release(self, node: Node) -> None:
        if node.data is not None:
            self.bytes_used -= node.size_bytes
            node.data = None

    def _forget(self, node: Node) -> None:
        """Remove a node and all below it from the tree; their files become old and leave."""
        for one in self._tree.remove(node):
            if one is not self._writing:
                self._release(one)
            with suppress(ValueError):
                self._queue.remove(one)

    def _bring(
        self, state: KvCache, node: Node, tokens: int, kept: Sequence[Node] | None
    ) -> Tensor | None:
        """Write a node's first tokens into the columns of a state; in a thread of its own.

        kept: if given, the bytes stay in RAM when there is room, and these nodes do not leave.
        Returns the node's bytes if they are in RAM. Raises OSError, BadFile, RuntimeError.
        """
        data = node.data
        if data is not None:
            copy_in(state, node.start, tokens, data, len(node.tokens))
            return data
        assert self._folder is not None, "a node is in RAM or on disk"
        with self._changed:
            stays = kept is not None and self._make_room(node.size_bytes, kept)
            self.bytes_used += node.size_bytes if stays else 0
        try:
            if stays or node.snapshot:
                whole = torch.empty(node.size_bytes, dtype=torch.uint8)
                self._folder.read(node, parts_of_buffer(whole))
                copy_in(state, node.start, tokens, whole, len(node.tokens))
                data = whole
            else:
                parts = parts_of(state, node.start, tokens, len(node.tokens))
                self._folder.read(node, parts)
        finally:
            with self._changed:
                if stays and data is not None and self._tree.nodes.get(node.key) is node:
                    node.data = data
                elif stays:
                    self.bytes_used -= node.size_bytes
        with self._changed:
            self.stats.bytes_read += node.size_bytes
        return data

    def _lose(self, node: Node, error: OSError | BadFile) -> None:
        """Forget a node whose file cannot be read."""
        with self._changed:
            self._forget(node)
        if not isinstance(error, FileNotFoundError):  # another process has removed it
            self._note(f"prefix cache: a file cannot be used: {reason(error)}")

    def _write(self) -> None:
        """Write nodes until the cache closes, or the disk fails."""
        folder = self._folder
        assert folder is not None
        while (node := self._next()) is not None:
            assert node.data is not None
            removed: list[bytes] | None = []
            try:
                removed = folder.make_room(node.size_bytes, {one.key for one in node.path})
                if removed is not None:
                    folder.write(node, node.data, self._pause)
                    folder.touch(node.path)
            except Abandoned:
                return
            except OSError as error:
                self._note(full_words(error, node.size_bytes))
                self._written(node, removed or (), failed=True)
                return
            self._written(node, removed or (), failed=removed is None)

    def _next(self) -> Node | None:
        """Wait for a node to write while no request runs; None: the cache closes."""
        with self._changed:
            while self._close_at == _NEVER and (self._running or not self._queue):
                self._changed.wait()
            if not self._queue or time.monotonic() >= self._close_at:
                return None
            self._writing = self._queue.popleft()
            return self._writing

    def _pause(self) -> None:
        """Wait while a request runs. Raises Abandoned."""
        with self._changed:
            while self._running and self._close_at == _NEVER:
                self._changed.wait()
            if time.monotonic() >= self._close_at:
                raise Abandoned

    def _written(self, node: Node, removed: Sequence[bytes], failed: bool) -> None:
        with self._changed:
            self._writing, node.on_disk = None, not failed
            self.stats.bytes_written += 0 if failed else node.size_bytes
            if self._tree.nodes.get(node.key) is not node:  # forgotten meanwhile
                self._release(node)
            for key in removed:
                gone = self._tree.nodes.get(key)
                if gone is not None:
                    gone.on_disk = False
                    if gone.data is None:
                        self._forget(gone)
