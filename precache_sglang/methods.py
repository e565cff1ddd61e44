"""The sharing methods, side by side.

A method is data: what the KV pool holds, who writes low-rank (LR) rows, and whose
pass publishes. The prefix cache, the scheduler and the attention backend read
these fields; nothing outside this file asks for a method by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Rows(Enum):
    """Whose LR rows a pass writes for tokens that nobody has fed before."""

    NONE = "none"
    OWN = "own"
    TEAM = "team"  # every adapter of the team
    COMMON = "common"  # one set of rows that all adapters share


@dataclass(frozen=True)
class Method:
    """One row of the methods table (architecture.md, section 4).

    Attributes:
        shared: Roles share one namespace in the prefix cache. Otherwise each adapter
            has its own, as in stock SGLang.
        base_kv: The KV pool holds base keys and values; the adapter's part is read
            from LR rows. Otherwise it holds complete keys and values.
        rows: LR rows written by a pass with an adapter.
        neutral_base: Base KV is published from an adapter-free pass, not from the
            adapted pass of the role that fed the tokens first.
        own_base: A role goes on reading the base KV of its own adapted pass for tokens that
            it fed itself (own base), and may do so before the neutral pass is done.
        summary: One line for ``--help`` and the README.
    """

    name: str
    shared: bool
    base_kv: bool
    rows: Rows
    neutral_base: bool
    summary: str
    own_base: bool = False

    @property
    def neutral_rows(self) -> Rows:
        """LR rows written by an adapter-free pass.

        A neutral pass writes the rows of the rest of the team. A user's request
        without an adapter is the same pass with nobody to leave out.
        """
        if self.neutral_base:
            return Rows.TEAM
        return Rows.NONE if self.rows is Rows.OWN else self.rows


METHODS: dict[str, Method] = {
    m.name: m
    for m in (
        Method(
            "nonshared",
            shared=False,
            base_kv=False,
            rows=Rows.NONE,
            neutral_base=False,
            summary="every role prefills the whole context; what stock prefix caches do",
        ),
        Method(
            "fullshared",
            shared=True,
            base_kv=False,
            rows=Rows.NONE,
            neutral_base=False,
            summary="roles reuse each other's complete KV as it is; fastest, least faithful",
        ),
        Method(
            "baseshared",
            shared=True,
            base_kv=True,
            rows=Rows.OWN,
            neutral_base=False,
            summary="one base KV; a role computes its own LR rows of the context (LRAgent)",
        ),
        Method(
            "baselrshared",
            shared=True,
            base_kv=True,
            rows=Rows.COMMON,
            neutral_base=False,
            summary="one base KV and one set of LR rows; needs adapters with equal A (LRAgent)",
        ),
        Method(
            "prelrshared",
            shared=True,
            base_kv=True,
            rows=Rows.TEAM,
            neutral_base=False,
            summary="one base KV; the working role writes the LR rows of the team (PReCache)",
        ),
        Method(
            "rebaseshared",
            shared=True,
            base_kv=True,
            rows=Rows.OWN,
            neutral_base=True,
            summary="base KV and the team's LR rows from an adapter-free pass (PReCache)",
        ),
        Method(
            "rebaseown",
            shared=True,
            base_kv=True,
            rows=Rows.OWN,
            neutral_base=True,
            own_base=True,
            summary="as rebaseshared, but a role keeps the base KV of its own turns (ours)",
        ),
    )
}

OFF = "off"
DEFAULT_METHOD = "rebaseown"
