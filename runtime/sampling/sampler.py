"""Choose the next token from logits.

The order is penalties → temperature → top-k → top-p → min-p, then one draw. The random generator is
our own, so that a seed gives the same text on every machine.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moeinf.runtime.files.regular import read_regular
from moeinf.runtime.requests import SamplingOptions as SamplingOptions
from moeinf.runtime.sampling.recent_tokens import RecentTokens

_MASK = (1 << 64) - 1
_GROUP = 64  # logits that share one maximum
OLLAMA_DEFAULTS = SamplingOptions(
    temperature=0.8, top_k=40, top_p=0.9, min_p=0.0, repeat_last_n=64, repeat_penalty=1.1
)
TRANSFORMERS_DEFAULTS = SamplingOptions(
    temperature=1.0, top_k=50, top_p=1.0, min_p=0.0, repeat_penalty=1.0
)
_GENERATION_KEYS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repeat_penalty",
}
_GREEDY_DEFAULTS = SamplingOptions(repeat_last_n=64, repeat_penalty=1.0)


def model_defaults(folder: Path) -> SamplingOptions:
    """Return the sampling defaults of a model's generation_config.json, or none without the file.

    A missing or invalid value takes the default of transformers' GenerationConfig. Without
    do_sample the temperature is 0 (greedy).
    """
    try:
        config = json.loads(read_regular(folder / "generation_config.json"))
    except (OSError, ValueError, RecursionError):
        return SamplingOptions()
    if not isinstance(config, dict):
        return SamplingOptions()
    options = TRANSFORMERS_DEFAULTS
    for key, name in _GENERATION_KEYS.items():
        value = config.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool):
            with suppress(ValueError):
                options = options.having(name, value)
    if options.repeat_penalty != 1.0:
        options = replace(options, repeat_last_n=-1)  # transformers penalises all previous tokens
    return options if config.get("do_sample") is True else replace(options, temperature=0.0)


class Random:
    """The generator splitmix64 (Steele, Lea and Flood 2014), the same on every machine."""

    def __init__(self, seed: int) -> None:
        self._state = seed & _MASK

    def uniform(self) -> float:
        """Return a float in [0, 1) with 53 random bits."""
        self._state = (self._state + 0x9E3779B97F4A7C15) & _MASK
        z = self._state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        return ((z ^ (z >> 31)) >> 11) * 2.0**-53


class Sampler:
    """The sampler of one request. `options` is complete, including the seed."""

    def __init__(self, options: SamplingOptions, model: SamplingOptions) -> None:
        wanted = options.over(model)
        # At temperature 0 only the user's and the model's options may change the argmax.
        defaults = _GREEDY_DEFAULTS if wanted.temperature == 0 else OLLAMA_DEFAULTS
        chosen = wanted.over(defaults)
        seed = chosen.seed if chosen.seed is not None and chosen.seed >= 0 else secrets.randbits(63)
        self.options = replace(chosen, seed=seed)
        self._random = Random(seed)
        self._recent = _recent_tokens(self.options)
        self._only_lowers = (
            (chosen.repeat_penalty is None or chosen.repeat_penalty >= 1)
            and (chosen.presence_penalty or 0.0) >= 0
            and (chosen.frequency_penalty or 0.0) >= 0
        )

    def choose(self, logits: NDArray[np.float32], history: Sequence[int]) -> int:
        """Return the next token from logits [vocab]; `history` is every token before it.

        The cost does not depend on the length of the history, if it is the grown list of the last
        call.
        """
        options = self.options
        if self._recent is not None:
            self._recent.follow(history, len(logits))
        some = self._candidates(logits, options.top_k if options.temperature else 1)
        scores = logits[some].astype(np.float64)
        self._penalise(scores, some)
        if not options.temperature:
            return int(some[scores.argmax()])
        order = _best(scores, options.top_k or len(scores))
        best = scores[order]
        with np.errstate(over="ignore"):  # an infinite difference gives probability 0
            probabilities = np.exp((best - best[0]) / options.temperature)
        probabilities /= probabilities.sum()
        if options.top_p is not None and options.top_p < 1:
            before = np.cumsum(probabilities) - probabilities
            keep = max(1, int((before < options.top_p).sum()))
            probabilities = probabilities[:keep]
        if options.min_p:
            probabilities = probabilities[probabilities >= options.min_p * probabilities[0]]
        sums = np.cumsum(probabilities)
        place = int(np.searchsorted(sums, self._random.uniform() * sums[-1], side="right"))
        return int(some[order[min(place, len(sums) - 1)]])

    def _candidates(self, logits: NDArray[np.float32], count: int | None) -> NDArray[np.intp]:
        """Return candidate tokens, ascending, that include the best `count` after penalties.

        These are the best `count` tokens that are not recent, and the recent tokens that can still
        be among the best. A count of 0 or None means all tokens.
        """
        if not count or count >= len(logits):
            return np.arange(len(logits))
        seen = None if self._recent is None else self._recent.seen
        others = logits if seen is None else np.where(seen, np.float32(-np.inf), logits)
        # Each group's maximum is a logit. So the `count` highest maxima are a lower bound for the
        # `count` highest logits. This avoids a slow partition of the whole vocabulary.
        groups = len(logits) // _GROUP
        some = others
        if count < groups:
            some = others[: groups * _GROUP].reshape(_GROUP, groups).max(0)
        edge = np.partition(some, len(some) - count)[len(some) - count]
        high = logits >= edge
        return np.flatnonzero(high if seen is None or self._only_lowers else high | seen)

    def _penalise(self, scores: NDArray[np.float64], tokens: NDArray[np.intp]) -> None:
        """Penalise the recent ones of `tokens` [n] in their scores [n], in place."""
        if self._recent is None:
            return
        options = self.options
        repeat = options.repeat_penalty if options.repeat_penalty is not None else 1.0
        places = np.flatnonzero(self._recent.seen[tokens])
        before = scores[places]
        after = np.where(before > 0, before / repeat, before * repeat)
        frequency = (options.frequency_penalty or 0.0) * self._recent.counts[tokens[places]]
        scores[places] = after - (options.presence_penalty or 0.0) - frequency


def _recent_tokens(options: SamplingOptions) -> RecentTokens | None:
    """Return a counter for the tokens to penalise, or None if no option penalises tokens."""
    if options.repeat_penalty in (None, 1.0) and not (
        options.presence_penalty or options.frequency_penalty
    ):
        return None
    return RecentTokens(64 if options.repeat_last_n is None else options.repeat_last_n)


def _best(scores: NDArray[np.float64], count: int) -> NDArray[np.intp]:
    """Return the indices of the `count` largest scores, the largest first, ties by index."""
    if count < len(scores):
        edge = np.partition(scores, len(scores) - count)[len(scores) - count]
        some = np.flatnonzero(scores >= edge)
        return some[np.argsort(-scores[some], kind="stable")][:count]
    return np.argsort(-scores, kind="stable")
