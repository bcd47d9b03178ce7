"""Measure how well a request's next experts are foretold, by layers and by tokens ahead."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moeinf.offload.policy.requests import RunningRequest
from moeinf.offload.routing.eamc import Eamc
from moeinf.offload.routing.trace import Recording
from scripts.study.replays import Bench, Floats, collection, percent, recording_of, table

LAYERS_AHEAD = (1, 2, 4)
TOKENS_AHEAD = (1, 4, 16)
WIDTH = 2  # experts predicted per layer, in units of K
_MATCHES = 5
_DECAY = 0.95
Used = NDArray[np.bool_]  # [T, L, E]
Found = dict[str, dict[int, list[tuple[float, float]]]]  # (right, all) events of each request


def predicted(path: Path, past: tuple[int, ...], now: tuple[int, ...]) -> tuple[Found, Found]:
    """Return the events of the requests `now` that were predicted, by layers and tokens ahead.

    `past` fills the EAMC and the co-activations.
    """
    recording = recording_of(path)
    eamc, together = collection(path, past, len(past)), _coactivations(recording, past)
    layers: Found = {}
    tokens: Found = {}
    for request in now:
        passes = recording.select([request]).passes
        shape = recording.shape
        prompt = np.zeros((shape.layers, shape.experts))
        for done in passes:
            if done.phase != "decode":
                prompt += done.eam(shape.experts, done.accepted)
        used = _used(recording, request, "decode")
        most = WIDTH * shape.top_k
        guesses = {
            "last use": _best(_last_uses(used), most),
            "decayed counts": _best(_decayed(used) + 1e-6 * prompt, most),
        }
        if prompt.any():
            guesses["prompt's counts"] = np.broadcast_to(_best(prompt, most), used.shape)
        after, ahead = _by_eamc(recording, request, eamc, most)
        for name, guess in {**guesses, "EAMC": after}.items():
            _count_tokens(tokens.setdefault(name, {}), used, guess)
        for name, guess in guesses.items():
            for distance in LAYERS_AHEAD:  # known: the tokens before
                same = guess[:-1] & used[1:]
                _add(layers, name, distance, same[:, distance:], used[1:, distance:])
        for distance in LAYERS_AHEAD:
            later = used[:, distance:]
            _add(layers, "EAMC", distance, ahead[distance][1:] & later[1:], later[1:])
            score = np.einsum(
                "tle,lef->tlf", used[:, :-distance].astype(np.float32), together[distance]
            )
            _add(layers, "co-activation", distance, _best(score, most)[1:] & later[1:], later[1:])
    return layers, tokens


def _add(found: Found, name: str, distance: int, right: Used, events: Used) -> None:
    found.setdefault(name, {}).setdefault(distance, []).append(
        (float(right.sum()), float(events.sum()))
    )


def _count_tokens(found: dict[int, list[tuple[float, float]]], used: Used, guess: Used) -> None:
    """Count the events of the next tokens that are in the guess after each token."""
    total = np.concatenate([np.zeros((1, *used.shape[1:])), used.cumsum(0)])
    for count in TOKENS_AHEAD:
        ends = len(used) - count
        if ends > 0:
            following = total[1 + count : 1 + count + ends] - total[1 : 1 + ends]
            right = (following * guess[:ends]).sum()
            found.setdefault(count, []).append((float(right), float(following.sum())))


def _used(recording: Recording, request: int, phase: str) -> Used:
    shape = recording.shape
    ids = [p.ids for p in recording.select([request]).passes if p.phase == phase]
    if not ids:
        return np.zeros((0, shape.layers, shape.experts), np.bool_)
    joined = np.concatenate(ids, 1).transpose(1, 0, 2)  # [T, L, K]
    used = np.zeros((len(joined), shape.layers, shape.experts), np.bool_)
    np.put_along_axis(used, joined.astype(np.int64), True, 2)
    return used


def _best(scores: NDArray[np.floating], most: int) -> Used:
    """Return the `most` experts of each layer with the largest scores [..., E]."""
    order = np.argpartition(-scores, most - 1, axis=-1)[..., :most]
    best = np.zeros(scores.shape, np.bool_)
    np.put_along_axis(best, order, True, -1)
    return best


def _last_uses(used: Used) -> Floats:
    times = np.where(used, np.arange(1, len(used) + 1)[:, None, None], 0)
    return np.maximum.accumulate(times, 0).astype(float)


def _decayed(used: Used) -> Floats:
    counts = np.zeros(used.shape)
    running = np.zeros(used.shape[1:])
    for token, chosen in enumerate(used):
        running = _DECAY * running + chosen
        counts[token] = running
    return counts


def _coactivations(recording: Recording, past: tuple[int, ...]) -> dict[int, NDArray[np.float32]]:
    """Return, by distance, how often expert e of layer l came with f of layer l + distance."""
    found = {}
    chosen = [_used(recording, r, phase) for r in past for phase in ("prefill", "decode")]
    used = np.concatenate(chosen).astype(np.float32)
    often = np.maximum(used.sum(0), 1)  # [L, E]
    for distance in LAYERS_AHEAD:
        pairs = np.einsum("tle,tlf->lef", used[:, :-distance], used[:, distance:], optimize=True)
        found[distance] = pairs / often[:-distance, :, None]
    return found


def _by_eamc(
    recording: Recording, request: int, eamc: Eamc, most: int
) -> tuple[Used, dict[int, Used]]:
    """Return what the EAMC predicts after each token, and for each layer some layers before it."""
    shape = recording.shape
    running, after = RunningRequest(eamc), []
    ahead: dict[int, list[Floats]] = {distance: [] for distance in LAYERS_AHEAD}
    for done in recording.select([request]).passes:
        running.begin_pass(done.phase)
        rows: dict[int, list[Floats]] = {distance: [] for distance in LAYERS_AHEAD}
        for layer, ids in enumerate(done.ids):
            running.routed(layer, ids)
            if done.phase == "decode":
                guess = running.predict(running.pair_similarity(), _MATCHES, "decode")
                assert guess is not None
                for distance in LAYERS_AHEAD:
                    if layer + distance < shape.layers:
                        rows[distance].append(guess[layer + distance])
        if done.phase == "decode":
            after.append(guess)
            for distance in LAYERS_AHEAD:
                ahead[distance].append(np.stack(rows[distance]))
    by_layer = {distance: _best(np.stack(ahead[distance]), most) for distance in LAYERS_AHEAD}
    return _best(np.stack(after), most), by_layer


def recall(bench: Bench, path: Path) -> Callable[[], str]:
    """Write the recall of 2K predicted experts; the first half of the requests is the past."""
    some = bench.few(path)
    half = max(1, len(some) // 2)
    wait = bench.ask(predicted, path, some[:half], some[half:])
    shape = recording_of(path).shape

    def text() -> str:
        by_layers, by_tokens = wait()
        names = list(dict.fromkeys([*by_tokens, *by_layers]))
        bench.curves[f"recall {path.stem}"] = by_layers, by_tokens
        rows = []
        for name in names:
            cells = [name]
            for found, distances in ((by_layers, LAYERS_AHEAD), (by_tokens, TOKENS_AHEAD)):
                for distance in distances:
                    pairs = np.array(found.get(name, {}).get(distance, []))
                    cells.append(percent(pairs[:, 0], pairs[:, 1]) if len(pairs) else "")
            rows.append(cells)
        chance = f"{100 * WIDTH * shape.top_k / shape.experts:.1f}"
        rows.append(["chance", *[chance] * (len(LAYERS_AHEAD) + len(TOKENS_AHEAD))])
        head = [f"recall of {WIDTH}K = {WIDTH * shape.top_k} per layer, %"]
        head += [f"{d} layer{'s' * (d > 1)} ahead" for d in LAYERS_AHEAD]
        head += [f"next {'token' if n == 1 else f'{n} tokens'}" for n in TOKENS_AHEAD]
        return table(head, rows)

    return text
