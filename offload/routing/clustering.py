"""Analyse an EAMC for a report: groups of similar requests, nearest neighbours, sparsity.

Predictions do not use this module. k-means is the paper's analysis (arXiv 2401.14361, section 5: 10
to 30 groups in 1,000 requests). The number of groups is the one with the best silhouette
(Rousseeuw 1987).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moeinf.offload.routing.eamc import Eamc

Floats = NDArray[np.float32]
_GROUP_COUNTS = (*range(2, 13), 15, 20, 25, 30)
_RESTARTS = 3
_ROUNDS = 25
_LEAST_SILHOUETTE = 0.25  # below, "no substantial structure" (Kaufman and Rousseeuw 1990)


@dataclass(frozen=True)
class Groups:
    """Groups of entries. of [N]: each entry's group, 0 is the largest.

    silhouette is 0 for a single group.
    """

    of: NDArray[np.int64]
    sizes: list[int]
    cohesion: list[float]  # mean cosine of a group's entries to its centre
    silhouette: float


@dataclass(frozen=True)
class Summary:
    """An EAMC in figures. similarity [N, N] is 1 - the distance of eamc.py."""

    entries: int
    prompt_events: int  # Σ counts: tokens · K · layers
    decode_events: int
    used_by_one: float  # mean share of all experts that a request uses
    used_by_all: float
    similarity: Floats
    groups: Groups
    heat: Floats  # [L, E]: share of a layer's events, over all requests


def summarise(eamc: Eamc) -> Summary:
    """Return the figures of an EAMC; an empty one has no groups."""
    order = eamc.oldest_first()  # the order of places depends on replacements
    prefill, decode = eamc.counts("prefill")[:, :, order], eamc.counts("decode")[:, :, order]
    both = prefill + decode
    count = len(eamc)
    vectors = np.concatenate([_unit(_flat(prefill)), _unit(_flat(decode))], axis=1)
    vectors = _unit(vectors)  # [N, 2LE]: their cosine is the mean of the parts' cosines
    similarity = (vectors @ vectors.T).clip(0, 1)
    total = both.sum(2)
    rows = total.sum(1, keepdims=True)
    return Summary(
        entries=count,
        prompt_events=int(prefill.sum(dtype=np.float64)),
        decode_events=int(decode.sum(dtype=np.float64)),
        used_by_one=float((both > 0).mean(axis=(0, 1)).mean()) if count else 0.0,
        used_by_all=float((total > 0).mean()),
        similarity=similarity,
        groups=find_groups(vectors, similarity),
        heat=(total / np.maximum(rows, 1)).astype(np.float32),
    )


def nearest(similarity: Floats) -> Floats:
    """Return each entry's similarity to the most similar other entry, [N]."""
    others = similarity.copy()
    np.fill_diagonal(others, -1)
    found: Floats = others.max(axis=1)
    return found


def find_groups(vectors: Floats, similarity: Floats) -> Groups:
    """Group unit vectors [N, D] by spherical k-means, with the best number of groups."""
    count = len(vectors)
    best, best_score = np.zeros(count, np.int64), 0.0
    for k in (k for k in _GROUP_COUNTS if k < count):
        of = _kmeans(vectors, k)
        score = silhouette(of, 1 - similarity)
        if score > max(best_score, _LEAST_SILHOUETTE):
            best, best_score = of, score
    return _ordered(best, vectors, best_score)


def silhouette(of: NDArray[np.int64], distance: Floats) -> float:
    """Return the mean over entries of (b - a) / max(a, b); an entry alone in its group counts 0.

    a is an entry's mean distance to the other entries of its group, b to those of the nearest other
    group.
    """
    names, sizes = np.unique(of, return_counts=True)
    if len(names) < 2:
        return 0.0
    member = of[:, None] == names  # [N, k]
    sums = distance @ member  # [N, k]
    own = member.argmax(1)
    rows = np.arange(len(of))
    a = sums[rows, own] / np.maximum(sizes[own] - 1, 1)
    means = sums / sizes
    means[rows, own] = np.inf
    b = means.min(1)
    scores = (b - a) / np.maximum(np.maximum(a, b), 1e-12)
    return float(np.where(sizes[own] > 1, scores, 0).mean())


def _kmeans(vectors: Floats, k: int) -> NDArray[np.int64]:
    """Return the best of a few runs, each from centres far apart; reproducible."""
    draw = np.random.default_rng(k)
    best, best_fit = np.zeros(len(vectors), np.int64), -np.inf
    for _ in range(_RESTARTS):
        centres = _far_apart(vectors, k, draw)
        of = np.full(len(vectors), -1)
        for _ in range(_ROUNDS):
            nearest_centre = (vectors @ centres.T).argmax(1)
            if (nearest_centre == of).all():
                break
            of = nearest_centre
            for group in range(k):
                if (of == group).any():
                    centres[group] = _unit(vectors[of == group].sum(0, keepdims=True))[0]
        fit = float((vectors * centres[of]).sum())
        if fit > best_fit:
            best, best_fit = of, fit
    return best


def _far_apart(vectors: Floats, k: int, draw: np.random.Generator) -> Floats:
    """Draw k centres by k-means++: each by its squared distance to the centres before."""
    chosen = [int(draw.integers(len(vectors)))]
    gap = 1 - vectors @ vectors[chosen[0]]
    for _ in range(k - 1):
        weights = np.maximum(gap.astype(np.float64), 0) ** 2
        total = weights.sum()
        odds = weights / total if total > 0 else np.full(len(vectors), 1 / len(vectors))
        chosen.append(int(draw.choice(len(vectors), p=odds)))
        gap = np.minimum(gap, 1 - vectors @ vectors[chosen[-1]])
    centres: Floats = vectors[chosen].copy()
    return centres


def _ordered(of: NDArray[np.int64], vectors: Floats, score: float) -> Groups:
    names, sizes = np.unique(of, return_counts=True)
    order = np.argsort(-sizes, kind="stable")
    renamed = np.zeros(len(of), np.int64)
    cohesion = []
    for place, group in enumerate(names[order]):
        mine = of == group
        renamed[mine] = place
        centre = _unit(vectors[mine].sum(0, keepdims=True))[0]
        cohesion.append(float((vectors[mine] @ centre).mean()))
    return Groups(renamed, [int(size) for size in sizes[order]], cohesion, score)


def _flat(counts: Floats) -> Floats:
    """Reshape [L, E, N] to [N, L·E]."""
    layers, experts, entries = counts.shape
    return np.ascontiguousarray(counts.reshape(layers * experts, entries).T)


def _unit(rows: Floats) -> Floats:
    """Divide each row by its length; a row of zeros stays 0."""
    lengths = np.sqrt((rows.astype(np.float64) ** 2).sum(1, keepdims=True))
    unit: Floats = (rows / np.maximum(lengths, 1e-12)).astype(np.float32)
    return unit
