"""What a step costs on this machine, as measured while it serves."""

from __future__ import annotations

# Weight of a new step; some fifty steps are remembered.
_WEIGHT = 0.02
# Until steps were seen: (tokens, seconds) of a small one and of a large one.
_SMALL, _LARGE = (1.0, 0.05), (512.0, 0.3)
# Steps of at least so many tokens count as large. Decode steps are small ones.
_LARGE_TOKENS = 64


class StepCost:
    """Seconds of a step as a constant plus a time for each token.

    The line goes through the mean small step and the mean large step, of late. On a machine
    that waits for its memory the constant is worth hundreds of tokens: so many more would
    double a decode step.
    """

    def __init__(self) -> None:
        self._means = [list(_SMALL), list(_LARGE)]

    def observe(self, num_tokens: int, seconds: float) -> None:
        mean = self._means[num_tokens >= _LARGE_TOKENS]
        for index, value in enumerate((num_tokens, seconds)):
            mean[index] += _WEIGHT * (value - mean[index])

    @property
    def per_token(self) -> float:
        """Seconds for one token more."""
        (few, quick), (many, slow) = self._means
        # Steps over long contexts can make the line fall; a token is never free.
        return max((slow - quick) / (many - few), 0.01 * slow / many)

    @property
    def fixed(self) -> float:
        """Seconds of a step without tokens."""
        few, quick = self._means[0]
        return max(quick - few * self.per_token, 0.0)

    @property
    def fixed_tokens(self) -> float:
        """How many tokens take as long as a step's constant part."""
        return self.fixed / self.per_token

    def seconds(self, num_tokens: int) -> float:
        return self.fixed + num_tokens * self.per_token

    def tokens_within(self, seconds: float) -> int:
        """Tokens of the largest step that takes at most `seconds`; 0 if there is none."""
        return max(0, int((seconds - self.fixed) / self.per_token))
