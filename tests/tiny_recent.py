"""Tiny configurations of the families of 2026, of which few are tested by default."""

from __future__ import annotations

from tests.tiny_families import Tiny

RECENT: dict[str, Tiny] = {}
# One configuration of each of these families is tested by default, and all with -m full.
BRIEF: tuple[str, ...] = ()
