"""Roles: which adapter a request runs under, and the adapter's K and V parts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from precache_sglang.errors import AdapterError
from precache_sglang.methods import Method, Rows

if TYPE_CHECKING:
    from sglang.srt.lora.lora import LoRAAdapter
    from sglang.srt.lora.lora_manager import LoRAManager

COMMON_ROWS = "common"
_DEFAULT_TEAM = "default"


@dataclass(frozen=True)
class Projection:
    """The LoRA pair of one projection (k or v) over all layers.

    Attributes:
        a: Per layer ``[rank, hidden]``: ``x @ a.T`` is a token's LR row.
        b: Per layer ``[rank, kv_heads * head_dim]``, already times the LoRA scale:
            LR rows are stored unscaled, so the scale is applied when they are read.
    """

    a: list[torch.Tensor]
    b: list[torch.Tensor]


@dataclass(frozen=True, eq=False)
class Adapter:
    """One loaded adapter.

    Attributes:
        lora_id: SGLang's id; new for every load.
        name: The role's name as a caller writes it.
        content: Hash of weights and scale. The same file loaded twice has one content,
            another file under the same name has another.
        rows_key: Key of its LR slices in the tree; None if it adapts neither k nor v,
            for then the base KV is all it reads.
        team: Name of its team.
        rank: LoRA rank.
        k, v: The projections, None where not adapted or not kept by the method.
    """

    lora_id: str
    name: str
    content: str
    rows_key: str | None
    team: str
    rank: int
    k: Projection | None
    v: Projection | None


@dataclass
class RoleRegistry:
    """The adapters that are loaded now, in loading order.

    ``stack`` is what a pass multiplies its input with: one block per distinct
    ``rows_key``, padded to the pool's width, so that one GEMM gives the rows of all.
    """

    method: Method
    teams: dict[str, list[str]]
    width: int
    has_k: bool
    adapters: dict[str, Adapter] = field(default_factory=dict)  # by lora_id
    blocks: dict[str, int] = field(default_factory=dict)  # rows_key -> index in the stack
    stack: list[torch.Tensor] = field(default_factory=list)  # per layer, see `_restack`

    def team_of(self, name: str) -> str:
        for team, roles in self.teams.items():
            if name in roles:
                return team
        return _DEFAULT_TEAM

    def of_team(self, team: str) -> list[Adapter]:
        return [a for a in self.adapters.values() if a.team == team]

    def base_team(self) -> str:
        """The team whose namespace requests without an adapter use."""
        return next(iter(self.teams), _DEFAULT_TEAM)

    def rows_written(self, adapter: Adapter | None, team: str, leave_out: str | None) -> list[str]:
        """Slice keys a pass writes for tokens that nobody has fed before, own key first.

        Args:
            adapter: The pass's adapter; None for an adapter-free pass.
            team: The pass's team.
            leave_out: Key of the role whose turn a neutral pass rebuilds.
        """
        which = self.method.rows if adapter else self.method.neutral_rows
        own = [adapter.rows_key] if adapter and adapter.rows_key else []
        if which is Rows.NONE:
            return []
        if which is Rows.COMMON:
            return [COMMON_ROWS] if COMMON_ROWS in self.blocks else []
        if which is Rows.OWN:
            return own
        rest = [a.rows_key for a in self.of_team(team) if a.rows_key and a.rows_key != leave_out]
        return list(dict.fromkeys([*own, *rest]))

    # -- loading and unloading ----------------------------------------------

    def add(self, adapter: Adapter) -> None:
        self.adapters[adapter.lora_id] = adapter
        self._restack()

    def remove(self, lora_id: str) -> str | None:
        """Forget an adapter; return its slice key if no other adapter uses it."""
        adapter = self.adapters.pop(lora_id)
        self._restack()
        key = adapter.rows_key
        return key if key is not None and key not in self.blocks else None

    def _restack(self) -> None:
        """Rebuild ``stack``: per layer ``[blocks * parts * width, hidden]``.

        ``parts`` is 2 (V, then K) when the pool keeps key rows, else 1. Rows beyond an
        adapter's rank stay zero, so a slot never holds another adapter's leftovers.
        """
        by_key = {a.rows_key: a for a in self.adapters.values() if a.rows_key is not None}
        self.blocks = {key: i for i, key in enumerate(by_key)}
        self.stack = []
        if not by_key:
            return
        any_projection = next(p for a in by_key.values() for p in (a.v, a.k) if p is not None)
        parts = 2 if self.has_k else 1
        for layer, like in enumerate(any_projection.a):
            block = like.new_zeros(len(by_key), parts, self.width, like.shape[1])
            for i, adapter in enumerate(by_key.values()):
                for part, projection in enumerate((adapter.v, adapter.k)[:parts]):
                    if projection is not None:
                        block[i, part, : adapter.rank] = projection.a[layer]
            self.stack.append(block.view(-1, like.shape[1]))


# -- reading adapters out of SGLang ------------------------------------------


def validate_config(name: str, config: dict[str, Any], method: Method, has_qk_norm: bool) -> None:
    """Refuse adapters that would be served wrongly. `config` is ``adapter_config.json``.

    Raises:
        AdapterError: with the setting, its value and the remedy.
    """
    for key in ("r", "lora_alpha", "target_modules"):
        if config.get(key) is None:
            raise AdapterError(
                f"Adapter {name!r}: adapter_config.json has no {key!r}; save the adapter "
                "again with PEFT."
            )
    for key in ("rank_pattern", "alpha_pattern", "modules_to_save", "layers_to_transform"):
        if config.get(key):
            raise AdapterError(
                f"Adapter {name!r}: {key}={config[key]!r} is not supported; train with one rank "
                "and alpha for every layer and no extra modules."
            )
    if config.get("bias", "none") != "none" or config.get("lora_bias"):
        raise AdapterError(
            f"Adapter {name!r}: trained biases (bias={config.get('bias')!r}) are not supported; "
            "train with bias='none'."
        )
    targets = config["target_modules"]
    targets = {targets} if isinstance(targets, str) else set(targets)
    supported = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    if unsupported := sorted(t for t in targets if t.split(".")[-1] not in supported):
        raise AdapterError(
            f"Adapter {name!r} targets {', '.join(unsupported)}; supported are "
            f"{', '.join(sorted(supported))}."
        )
    if "v_proj" in targets and "q_proj" not in targets or "k_proj" in targets and not (
        {"q_proj", "v_proj"} <= targets
    ):
        raise AdapterError(
            f"Adapter {name!r} targets {', '.join(sorted(targets))}: SGLang 0.5.23 stacks q, k "
            "and v and needs q_proj and v_proj when either k_proj or v_proj is adapted."
        )
    if method.base_kv and has_qk_norm and "k_proj" in targets:
        raise AdapterError(
            f"Adapter {name!r} adapts k_proj, but this model normalises keys after the "
            "projection, so base keys and low-rank rows cannot be added; use nonshared or "
            "fullshared, or an adapter without k_proj."
        )


def targets_k(adapter: LoRAAdapter) -> bool:
    targets = adapter.config.target_modules
    return "k_proj" in ({targets} if isinstance(targets, str) else set(targets))


def read_adapter(
    lora_id: str, name: str, lora: LoRAAdapter, registry: RoleRegistry, device: torch.device,
    dtype: torch.dtype, kv_size: int,
) -> Adapter:
    """Build an `Adapter` from SGLang's CPU copy of the weights.

    SGLang stacks q, k and v: ``lora_A [3r, hidden]``, ``lora_B [q + 2 kv, r]``.
    """
    digest = hashlib.sha256(f"{lora.scaling!r}".encode())
    k_pair: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    v_pair: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    rank = lora.config.r
    num_tensors = 0
    for layer in lora.layers:
        for weight_name in sorted(layer.weights):
            weight = layer.weights[weight_name]
            num_tensors += 1
            digest.update(weight_name.encode())
            digest.update(weight.contiguous().view(torch.uint8).numpy().tobytes())
            if "qkv_proj" not in weight_name:
                continue
            if "lora_A" in weight_name:
                k_pair[0].append(weight[rank : 2 * rank].to(device, dtype))
                v_pair[0].append(weight[2 * rank :].to(device, dtype))
            else:
                q_size = weight.shape[0] - 2 * kv_size
                scaled = (weight[q_size:].float() * lora.scaling).to(device, dtype)
                k_pair[1].append(scaled[:kv_size].T.contiguous())
                v_pair[1].append(scaled[kv_size:].T.contiguous())
    if num_tensors == 0:
        raise AdapterError(
            f"Adapter {name!r} has no tensor that belongs to this model's layers; was it "
            "trained for another architecture?"
        )
    has_rows = registry.method.base_kv and bool(v_pair[0])
    if has_rows and len(v_pair[0]) != len(lora.layers):
        raise AdapterError(
            f"Adapter {name!r} adapts v_proj in {len(v_pair[0])} of {len(lora.layers)} layers; "
            "adapt all layers or none."
        )
    has_k = has_rows and targets_k(lora)
    if has_rows and rank > registry.width:
        raise AdapterError(
            f"Adapter {name!r} has rank {rank}, above the low-rank pool's width "
            f"{registry.width}; start with --max-lora-rank {rank}."
        )
    if has_k and not registry.has_k:
        raise AdapterError(
            f"Adapter {name!r} adapts k_proj, but no adapter at start-up did, so the pool has no "
            "key rows; start with --lora-target-modules q_proj k_proj v_proj o_proj."
        )
    content = digest.hexdigest()[:32]
    rows_key = None
    if has_rows:
        rows_key = COMMON_ROWS if registry.method.rows is Rows.COMMON else content
    adapter = Adapter(
        lora_id=lora_id,
        name=name,
        content=content,
        rows_key=rows_key,
        team=registry.team_of(name),
        rank=rank,
        k=Projection(*k_pair) if has_k else None,
        v=Projection(*v_pair) if has_rows else None,
    )
    if registry.method.rows is Rows.COMMON:
        _require_equal_a(adapter, registry.adapters.values())
    return adapter


def _require_equal_a(adapter: Adapter, others: Iterable[Adapter]) -> None:
    """One common set of rows is only right if every adapter would write the same."""
    for other in others:
        same = adapter.rank == other.rank
        for mine, theirs in ((adapter.v, other.v), (adapter.k, other.k)):
            if (mine is None) != (theirs is None):
                same = False
            elif mine is not None and theirs is not None:
                same = same and all(
                    torch.equal(x, y) for x, y in zip(mine.a, theirs.a, strict=True)
                )
        if not same:
            raise AdapterError(
                f"baselrshared needs adapters with one common A: {adapter.name!r} and "
                f"{other.name!r} differ. Use --precache-method prelrshared, which takes any "
                "adapters, or train them from one frozen A."
            )


def registered_names(manager: LoRAManager) -> dict[str, str]:
    """lora_id to role name of the adapters that SGLang has loaded."""
    return {lora_id: ref.lora_name or lora_id for lora_id, ref in manager.lora_refs.items()}
