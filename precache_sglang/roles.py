"""Roles: which adapter a request runs under, and the adapter's K and V parts."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from precache_sglang.config import DEFAULT_TEAM
from precache_sglang.errors import AdapterError, UnsupportedError
from precache_sglang.methods import Method, Rows

if TYPE_CHECKING:
    from sglang.srt.lora.lora import LoRAAdapter
    from sglang.srt.lora.lora_manager import LoRAManager
    from sglang.srt.lora.mem_pool import LoRAMemoryPool

    from precache_sglang.adapter_tables import AdapterTables

COMMON_ROWS = "common"
# Fields of adapter_config.json that make an adapter more than x + s (x A) B.
_REFUSED_FIELDS = (
    "use_dora",
    "rank_pattern",
    "alpha_pattern",
    "modules_to_save",
    "layers_to_transform",
    "trainable_token_indices",
    "target_parameters",
    "alora_invocation_tokens",
)


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
        loaded: When it was loaded, on the monotonic clock.
    """

    lora_id: str
    name: str
    content: str
    rows_key: str | None
    team: str
    rank: int
    k: Projection | None
    v: Projection | None
    loaded: float = field(default_factory=time.monotonic)


@dataclass
class RoleRegistry:
    """The adapters that are loaded now, in loading order.

    ``stack`` is what a pass multiplies its input with: one block per distinct
    ``rows_key``, padded to the pool's width, so that one GEMM gives the rows of all.

    Attributes:
        tables: The adapters' B for kernels that read them on the device; None without.
        fixed_blocks: Number of blocks that ``stack`` always has, for captured graphs hold
            its address; 0: as many as are needed.
    """

    method: Method
    teams: dict[str, list[str]]
    width: int
    has_k: bool
    adapters: dict[str, Adapter] = field(default_factory=dict)  # by lora_id
    blocks: dict[str, int] = field(default_factory=dict)  # rows_key -> index in the stack
    stack: list[torch.Tensor] = field(default_factory=list)  # per layer, see `_restack`
    tables: AdapterTables | None = None
    fixed_blocks: int = 0

    def team_of(self, name: str) -> str:
        for team, roles in self.teams.items():
            if name in roles:
                return team
        return DEFAULT_TEAM

    def team_names(self) -> list[str]:
        """All teams, in the order that namespaces number them."""
        return [*self.teams, DEFAULT_TEAM]

    def of_team(self, team: str) -> list[Adapter]:
        return [a for a in self.adapters.values() if a.team == team]

    def base_team(self) -> str:
        """The team whose namespace requests without an adapter use."""
        return next(iter(self.teams), DEFAULT_TEAM)

    def rows_written(
        self,
        adapter: Adapter | None,
        team: str,
        leave_out: str | None,
        whole_team: bool = False,
    ) -> list[str]:
        """Slice keys a pass writes for tokens that nobody has fed before, own key first.

        Args:
            adapter: The pass's adapter; None for an adapter-free pass.
            team: The pass's team.
            leave_out: Key of the role whose turn a neutral pass rebuilds.
            whole_team: Whatever the method needs, write the rows of every role.
        """
        which = self.method.rows if adapter else self.method.neutral_rows
        if whole_team:
            which = Rows.TEAM
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
        if self.tables is not None:
            self.tables.add(adapter)
        self.adapters[adapter.lora_id] = adapter
        self._restack()

    def use_tables(self, tables: AdapterTables) -> None:
        """Keep `tables` in line with what is loaded, from now on.

        Raises:
            UnsupportedError: if graphs are to be captured, but no adapter shows the shapes.
        """
        if tables.is_fixed and not any(a.rows_key for a in self.adapters.values()):
            raise UnsupportedError(
                "--precache-cuda-graph needs an adapter on v_proj at start-up (--lora-paths): its "
                "low-rank rows are part of what is captured. Give one, or leave the flag out."
            )
        for adapter in self.adapters.values():
            tables.add(adapter)
        self.tables = tables
        if tables.is_fixed:
            self.fixed_blocks = tables.capacity
            self._restack()

    def remove(self, lora_id: str) -> str | None:
        """Forget an adapter; return its slice key if no other adapter uses it."""
        adapter = self.adapters.pop(lora_id)
        if self.tables is not None:
            self.tables.remove(lora_id)
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
        before, self.stack = self.stack, []
        if not by_key:
            if self.fixed_blocks:
                self.stack = [stack.zero_() for stack in before]
            return
        any_projection = next(p for a in by_key.values() for p in (a.v, a.k) if p is not None)
        parts = 2 if self.has_k else 1
        for layer, like in enumerate(any_projection.a):
            num_blocks = self.fixed_blocks or len(by_key)
            block = like.new_zeros(num_blocks, parts, self.width, like.shape[1])
            for i, adapter in enumerate(by_key.values()):
                for part, projection in enumerate((adapter.v, adapter.k)[:parts]):
                    if projection is not None:
                        block[i, part, : adapter.rank] = projection.a[layer]
            stack = block.view(-1, like.shape[1])
            if self.fixed_blocks and layer < len(before) and before[layer].shape == stack.shape:
                stack = before[layer].copy_(stack)
            self.stack.append(stack)

    def stack_of(self, layer: int, num_blocks: int) -> torch.Tensor:
        """The first `num_blocks` blocks of a layer's stack."""
        return self.stack[layer][: num_blocks * (2 if self.has_k else 1) * self.width]


# -- reading adapters out of SGLang ------------------------------------------


def validate_config(name: str, config: dict[str, Any], method: Method, has_qk_norm: bool) -> None:
    """Refuse adapters that would be served wrongly. `config` is ``adapter_config.json``.

    Raises:
        AdapterError: with the setting, its value and the remedy.
    """
    require_fields(f"Adapter {name!r}", config)
    for key in _REFUSED_FIELDS:
        if config.get(key):
            raise AdapterError(
                f"Adapter {name!r}: {key}={config[key]!r} is not supported; train a plain LoRA: "
                "one rank and alpha for every layer and no extra modules."
            )
    if config.get("bias", "none") != "none" or config.get("lora_bias"):
        raise AdapterError(
            f"Adapter {name!r}: trained biases (bias={config.get('bias')!r}) are not supported; "
            "train with bias='none'."
        )
    targets = _projections(config["target_modules"])
    supported = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    if unsupported := sorted(targets - supported):
        raise AdapterError(
            f"Adapter {name!r} targets {', '.join(unsupported)}; supported are "
            f"{', '.join(sorted(supported))}."
        )
    if targets & {"q_proj", "k_proj", "v_proj"} and not {"q_proj", "v_proj"} <= targets:
        raise AdapterError(
            f"Adapter {name!r} targets {', '.join(sorted(targets))}: SGLang 0.5.23 stacks q, k "
            "and v and needs both q_proj and v_proj when any of the three is adapted."
        )
    if "up_proj" in targets and "gate_proj" not in targets:
        raise AdapterError(
            f"Adapter {name!r} targets {', '.join(sorted(targets))}: SGLang 0.5.23 stacks gate "
            "and up and needs gate_proj when up_proj is adapted."
        )
    if method.base_kv and has_qk_norm and "k_proj" in targets:
        raise AdapterError(
            f"Adapter {name!r} adapts k_proj, but this model normalises keys after the "
            "projection, so base keys and low-rank rows cannot be added; use nonshared or "
            "fullshared, or an adapter without k_proj."
        )


def require_fields(subject: str, config: Any) -> None:
    """Check what SGLang reads from ``adapter_config.json`` before it asks anybody.

    Raises:
        AdapterError: starting with `subject`.
    """
    again = "save the adapter again with PEFT"
    if not isinstance(config, dict):
        raise AdapterError(f"{subject}: adapter_config.json holds no object; {again}.")
    for key in ("r", "lora_alpha", "target_modules"):
        if config.get(key) is None:
            raise AdapterError(f"{subject}: adapter_config.json has no {key!r}; {again}.")
    rank, alpha, targets = config["r"], config["lora_alpha"], config["target_modules"]
    listed = isinstance(targets, list) and all(isinstance(target, str) for target in targets)
    for key, right, what in (
        ("r", isinstance(rank, int) and rank > 0, "a positive whole number"),
        ("lora_alpha", isinstance(alpha, (int, float)), "a number"),
        ("target_modules", bool(listed and targets), "a list of module names"),
        ("peft_type", str(config.get("peft_type")).upper() == "LORA", "LORA"),
    ):
        if not right:
            raise AdapterError(
                f"{subject}: {key}={config.get(key)!r} in adapter_config.json is not {what}; "
                f"{again}."
            )


def require_rank(name: str, rank: int, largest: int) -> None:
    if rank > largest:
        raise AdapterError(
            f"Adapter {name!r} has rank {rank}, above this server's {largest}; start with "
            f"--max-lora-rank {rank}."
        )


def targets_k(adapter: LoRAAdapter) -> bool:
    return "k_proj" in _projections(adapter.config.target_modules)


def _projections(target_modules: Iterable[str]) -> set[str]:
    """``self_attn.q_proj`` is another way to write ``q_proj``."""
    return {target.split(".")[-1] for target in target_modules}


def read_adapter(
    lora_id: str,
    name: str,
    lora: LoRAAdapter,
    pool: LoRAMemoryPool,
    registry: RoleRegistry,
    device: torch.device,
    dtype: torch.dtype,
    kv_size: int,
) -> Adapter:
    """Build an `Adapter` from SGLang's CPU copy of the weights.

    SGLang stacks q, k and v: ``lora_A [3r, hidden]``, ``lora_B [q + 2 kv, r]``.
    """
    _require_fit(name, lora, pool)
    digest = hashlib.sha256(f"{lora.scaling!r}".encode())
    k_pair: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    v_pair: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    rank = lora.config.r
    for layer in lora.layers:
        for weight_name in sorted(layer.weights):
            weight = layer.weights[weight_name]
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
    has_rows = registry.method.base_kv and bool(v_pair[0])
    if has_rows and len(v_pair[0]) != len(lora.layers):
        raise AdapterError(
            f"Adapter {name!r} adapts v_proj in {len(v_pair[0])} of {len(lora.layers)} layers; "
            "adapt all layers or none."
        )
    has_k = has_rows and targets_k(lora)
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


def _require_fit(name: str, lora: LoRAAdapter, pool: LoRAMemoryPool) -> None:
    """Check every tensor against the buffer that SGLang will copy it into.

    SGLang checks as it copies, which is in the middle of serving.
    """
    rank = lora.config.r
    require_rank(name, rank, pool.max_lora_rank)
    if not any(layer.weights for layer in lora.layers):
        raise AdapterError(
            f"Adapter {name!r} has no tensor that belongs to this model's layers; was it "
            "trained for another architecture?"
        )
    for index, layer in enumerate(lora.layers):
        halves: dict[str, set[str]] = {}
        for weight_name, weight in layer.weights.items():
            module = next((m for m in pool.A_buffer if f".{m}." in weight_name), None)
            half = next((h for h in ("lora_A", "lora_B") if h in weight_name), None)
            if module is None or half is None:
                raise AdapterError(
                    f"Adapter {name!r}: no LoRA of this server takes {weight_name} (served: "
                    f"{', '.join(sorted(pool.A_buffer))}). Was it trained for another "
                    "architecture? Else name its modules with --lora-target-modules."
                )
            if half == "lora_A":
                _, stacked, width = pool.A_buffer[module][index].shape
                expected = (stacked // pool.max_lora_rank * rank, width)
            else:
                expected = (pool.B_buffer[module][index].shape[1], rank)
            if tuple(weight.shape) != expected:
                raise AdapterError(
                    f"Adapter {name!r}: {weight_name} has shape {tuple(weight.shape)}, but this "
                    f"model and r={rank} need {expected}. Was it trained for another model, or "
                    "with another r than adapter_config.json says?"
                )
            if not bool(torch.isfinite(weight).all()):
                raise AdapterError(
                    f"Adapter {name!r}: {weight_name} holds values that are not finite; they "
                    "would spoil the context that the roles share. Train it again."
                )
            halves.setdefault(module, set()).add(half)
        for module, found in halves.items():
            if len(found) != 2:
                raise AdapterError(
                    f"Adapter {name!r}: {module} of layer {index} has {found.pop()} only; save "
                    "the adapter again with PEFT."
                )


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
