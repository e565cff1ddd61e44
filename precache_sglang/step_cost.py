"""What a step costs on this machine, as measured while it serves."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from scipy.optimize import nnls

# Steps remembered of each kind, decode and prefill, and how often the fit is renewed.
_REMEMBERED = 64
_RENEW_EVERY = 8


class Load(NamedTuple):
    """What one forward has to do, apart from being a forward.

    Attributes:
        tokens: Tokens that go through the linear layers.
        context: Cached tokens that attention reads, its own new ones included.
        pairs: Pairs of a query token and a token that it attends to.
    """

    tokens: int = 0
    context: int = 0
    pairs: int = 0

    @classmethod
    def of(cls, spans: Iterable[tuple[int, int]]) -> Load:
        """The load of ``(start, end)`` token positions, each of a context of its own."""
        tokens = context = pairs = 0
        for start, end in spans:
            tokens += end - start
            context += end
            pairs += (end - start) * (start + end + 1) // 2
        return cls(tokens, context, pairs)


class StepCost:
    """Seconds of a step as a constant plus a price for each part of its load.

    Fitted to recent steps: prices are not negative, and every step counts by its relative
    error, so that a short decode step weighs as much as a long prefill. Spans beside a step
    pay for what they add and nothing for the constant.
    """

    def __init__(self) -> None:
        # Two made-up steps, until real ones push them out.
        self._decode = deque([(Load(1, 500, 500), 0.05)], maxlen=_REMEMBERED)
        self._others = deque([(Load(512, 512, 131_000), 0.3)], maxlen=_REMEMBERED)
        self._until_fit = _RENEW_EVERY
        self._prices = self._fit()

    def observe(self, load: Load, seconds: float, decodes: bool) -> None:
        (self._decode if decodes else self._others).append((load, seconds))
        self._until_fit -= 1
        if self._until_fit <= 0:
            self._until_fit = _RENEW_EVERY
            # Without an answer within its iterations the prices stay as they are.
            with contextlib.suppress(RuntimeError):
                self._prices = self._fit()

    def _fit(self) -> np.ndarray:
        steps = [*self._decode, *self._others]
        features = np.array([(1.0, *load) for load, _ in steps])
        seconds = np.array([max(taken, 1e-4) for _, taken in steps])
        scale = features.max(axis=0)
        prices, _ = nnls(features / scale / seconds[:, None], np.ones(len(steps)))
        return prices / scale

    def added(self, load: Load) -> float:
        """Seconds by which `load` lengthens a step."""
        return float(self._prices[1:] @ np.array(load, dtype=float))

    def prices(self) -> dict[str, float]:
        """Microseconds of a step, and of one more of everything in `Load`."""
        names = ("step", *Load._fields)
        return {
            name: round(price * 1e6, 4) for name, price in zip(names, self._prices, strict=True)
        }

    @property
    def fixed(self) -> float:
        """Seconds of a step with next to no load."""
        return float(self._prices[0])

    def is_worth(self, load: Load) -> bool:
        """Whether at most half of what `load` adds is for reading its context."""
        return 2 * self.added(Load(context=load.context)) <= self.added(load)

    def seconds(self, load: Load) -> float:
        """Seconds of a step with nothing but `load`."""
        return self.fixed + self.added(load)

    def longest(self, start: int, end: int, seconds: float) -> int:
        """Tokens from `start` on, at most up to `end`, that lengthen a step by that much.

        Found by halving, so that it may be up to half of what there is time for.
        """
        count = end - start
        while count > 0 and self.added(Load.of([(start, start + count)])) > seconds:
            count //= 2
        return count
