"""The sharing methods in plain float32 PyTorch: what the server must reproduce.

One turn is one dense causal pass over `prompt + output[:-1]` (the last sampled token is never fed).
Rows are kept per token in a trie, so tokens that two turns have in common are stored once:

    base KV   [layers, 2, kv_heads, head_dim]   keys after RoPE, then values
    LR rows   [slots, rank] for each adapter    x A, unscaled; one slot per adapted k_proj or v_proj

A pass reads   keys   = base + RoPE(s Zk Bk)
               values = base + s Zv Bv
and a method decides who writes what (`METHODS`). Who owns which tokens of a turn:

    0 ........ lr_len ........ base_len ........ len(prompt) ........ len(tokens)
    | read only | replay: base   | new: base KV and LR rows are computed           |
    |           | KV is read, LR |                                                 |
    |           | rows computed  |                                                 |

The last prompt token is always computed, for its logits; rows it already has stay as they are.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM")
MODULES = {
    "q_proj": "self_attn",
    "k_proj": "self_attn",
    "v_proj": "self_attn",
    "o_proj": "self_attn",
    "gate_proj": "mlp",
    "up_proj": "mlp",
    "down_proj": "mlp",
}
# Adapted projections whose output is kept per token, and so need LR rows.
KEPT = ("k_proj", "v_proj")

Slot = tuple[int, str]  # (layer, projection)


@dataclass(frozen=True)
class Method:
    """What is stored in a turn. Defaults are BaseShared's."""

    # Keys and values are stored with the adapter's term in them; there are no LR rows.
    full_kv: bool = False
    # Each adapter has its own trie; nothing is shared.
    per_adapter: bool = False
    # LR rows belong to the matrices A, not to the adapter; all adapters must have the same A.
    common_rows: bool = False
    # New tokens get the LR rows of every loaded adapter, not only the active one.
    team_rows: bool = False
    # Base KV, and the LR rows of inactive adapters, come from a neutral pass after the turn.
    neutral_base: bool = False
    # A role goes on reading the base KV of its own adapted pass for tokens that it fed.
    own_base: bool = False


METHODS = {
    "nonshared": Method(full_kv=True, per_adapter=True),
    "fullshared": Method(full_kv=True),
    "baseshared": Method(),
    "baselrshared": Method(common_rows=True, team_rows=True),
    "prelrshared": Method(team_rows=True),
    "rebaseshared": Method(team_rows=True, neutral_base=True),
    "rebaseown": Method(team_rows=True, neutral_base=True, own_base=True),
}


@dataclass(frozen=True)
class Weights:
    """Base weights, shared by any number of engines. `layers[i]["q_proj.weight"]` and so on."""

    embedding: Tensor  # [vocab, hidden]
    head: Tensor  # [vocab, hidden]
    final_norm: Tensor  # [hidden]
    layers: list[dict[str, Tensor]]
    head_dim: int
    norm_eps: float
    rope_theta: float

    @classmethod
    def load(cls, folder: str | Path) -> "Weights":
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        config = model.config
        _check_config(config)
        state = model.state_dict()
        layers: list[dict[str, Tensor]] = []
        for index in range(config.num_hidden_layers):
            prefix = f"model.layers.{index}."
            # "self_attn.q_proj.weight" becomes "q_proj.weight"; the names stay unique.
            layers.append(
                {
                    ".".join(name.split(".")[-2:]): tensor
                    for name, tensor in state.items()
                    if name.startswith(prefix)
                }
            )
        head_dim = getattr(config, "head_dim", None)
        return cls(
            embedding=state["model.embed_tokens.weight"],
            head=state["lm_head.weight"],
            final_norm=state["model.norm.weight"],
            layers=layers,
            head_dim=head_dim or config.hidden_size // config.num_attention_heads,
            norm_eps=config.rms_norm_eps,
            rope_theta=config.rope_parameters["rope_theta"],
        )

    def linear(self, layer: int, projection: str, x: Tensor) -> Tensor:
        weights = self.layers[layer]
        return F.linear(x, weights[f"{projection}.weight"], weights.get(f"{projection}.bias"))

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.norm_eps) * weight

    def heads(self, x: Tensor) -> Tensor:
        """[tokens, heads * head_dim] -> [tokens, heads, head_dim]."""
        return x.view(len(x), x.shape[-1] // self.head_dim, self.head_dim)

    def rope(self, x: Tensor, first_position: int) -> Tensor:
        """Rotate x [tokens, heads, head_dim] at consecutive positions; halves, not pairs."""
        half = self.head_dim // 2
        exponents = torch.arange(half, dtype=torch.float32) * 2 / self.head_dim
        positions = torch.arange(first_position, first_position + len(x), dtype=torch.float32)
        angles = torch.outer(positions, 1.0 / self.rope_theta**exponents)[:, None, :]
        cos, sin = angles.cos(), angles.sin()
        low, high = x[..., :half], x[..., half:]
        return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


def _check_config(config: Any) -> None:
    """Refuse what the forward pass below would silently compute wrongly."""
    if config.architectures[0] not in ARCHITECTURES:
        raise ValueError(f"{config.architectures[0]} is not one of {', '.join(ARCHITECTURES)}")
    if config.rope_parameters["rope_type"] != "default":
        raise ValueError(f"rope_type {config.rope_parameters['rope_type']!r}: only 'default'")
    if config.hidden_act != "silu":
        raise ValueError(f"hidden_act {config.hidden_act!r}: only 'silu'")
    window = getattr(config, "sliding_window", None)
    if window is not None and window < config.max_position_embeddings:
        raise ValueError(f"sliding_window {window}: only full attention")


@dataclass(frozen=True)
class Adapter:
    """LoRA matrices as PEFT stores them: A [rank, in], B [out, rank]."""

    a: dict[Slot, Tensor]
    b: dict[Slot, Tensor]
    rank: int
    scaling: float

    @classmethod
    def load(cls, folder: str | Path) -> "Adapter":
        config = json.loads((Path(folder) / "adapter_config.json").read_text())
        for unsupported in ("use_dora", "rank_pattern", "alpha_pattern", "modules_to_save"):
            if config.get(unsupported):
                raise ValueError(f"{folder}: {unsupported} is not supported")
        rank = config["r"]
        a: dict[Slot, Tensor] = {}
        b: dict[Slot, Tensor] = {}
        for name, tensor in load_file(Path(folder) / "adapter_model.safetensors").items():
            match = re.search(r"\.layers\.(\d+)\.\w+\.(\w+)\.lora_([AB])\.weight$", name)
            if match is None or match[2] not in MODULES:
                raise ValueError(f"{folder}: tensor {name} is not supported")
            (a if match[3] == "A" else b)[int(match[1]), match[2]] = tensor.float()
        divisor = rank**0.5 if config.get("use_rslora") else rank
        return cls(a=a, b=b, rank=rank, scaling=config["lora_alpha"] / divisor)

    @cached_property
    def slots(self) -> list[Slot]:
        """The adapted projections that need LR rows, layer by layer."""
        return sorted(slot for slot in self.a if slot[1] in KEPT)

    @cached_property
    def content(self) -> str:
        """Equal for adapters that compute the same; a role's name is no part of it."""
        return _digest([self.a, self.b], f"{self.scaling}")

    @cached_property
    def row_matrices(self) -> str:
        """Equal for adapters whose LR rows are interchangeable."""
        return _digest([{slot: self.a[slot] for slot in self.slots}], "")

    def rows(self, layer: int, x: Tensor) -> list[Tensor]:
        """LR rows [tokens, rank] of one layer's slots for the attention input x."""
        return [x @ self.a[slot].T for slot in self.slots if slot[0] == layer]

    def expand(self, slot: Slot, rows: Tensor) -> Tensor:
        return self.scaling * (rows @ self.b[slot].T)


def _digest(tensors: Sequence[Mapping[Slot, Tensor]], extra: str) -> str:
    digest = hashlib.sha256(extra.encode())
    for group in tensors:
        for slot in sorted(group):
            digest.update(f"{slot}{tuple(group[slot].shape)}".encode())
            digest.update(group[slot].contiguous().numpy().tobytes())
    return digest.hexdigest()


@dataclass
class TokenNode:
    """One cached token after its predecessors. Only the root has no base KV."""

    base: Tensor | None = None  # [layers, 2, kv_heads, head_dim]
    lr: dict[str, Tensor] = field(default_factory=dict)  # row key -> [slots, rank]
    feeder: str = ""  # content of the adapter that fed the token first
    own: Tensor | None = None  # base KV of the feeder's adapted pass; as `base`
    children: dict[int, "TokenNode"] = field(default_factory=dict)

    def match(self, tokens: Sequence[int]) -> list["TokenNode"]:
        """The nodes of the longest cached prefix of `tokens`."""
        path: list[TokenNode] = []
        node = self
        for token in tokens:
            if token not in node.children:
                break
            node = node.children[token]
            path.append(node)
        return path

    def insert(self, tokens: Sequence[int]) -> list["TokenNode"]:
        """The nodes of all `tokens`, made where they are missing."""
        path: list[TokenNode] = []
        node = self
        for token in tokens:
            node = node.children.setdefault(token, TokenNode())
            path.append(node)
        return path

    def walk(self) -> Iterator["TokenNode"]:
        pending = [self]
        while pending:
            node = pending.pop()
            pending.extend(node.children.values())
            yield node


@dataclass(frozen=True)
class Pass:
    """What one forward over tokens[start:] computed. No adapter term in `base` unless full KV."""

    start: int
    hidden: Tensor  # [computed, hidden], after the last norm
    base: Tensor  # [computed, layers, 2, kv_heads, head_dim]
    lr: dict[str, Tensor]  # row key -> [computed, slots, rank]


@dataclass(frozen=True)
class Turn:
    logprobs: Tensor  # [len(output)], of the output tokens
    log_softmax: Tensor  # [len(output), vocab]
    base_len: int  # prompt tokens whose base KV was cached
    lr_len: int  # prompt tokens for which nothing at all was missing
    compute_from: int  # first token that was computed


class ReferenceEngine:
    """One namespace. Nothing is ever evicted: a new engine is an empty one."""

    def __init__(
        self,
        model: Weights | str | Path,
        method: str,
        adapters: Mapping[str, str | Path] | None = None,
    ) -> None:
        self.weights = model if isinstance(model, Weights) else Weights.load(model)
        self.method = METHODS[method]
        self._adapters: dict[str, Adapter] = {}
        # Under per_adapter the key is the adapter's content; else there is only the key "".
        self._roots: dict[str, TokenNode] = {}
        for role, folder in (adapters or {}).items():
            self.load(role, folder)

    def load(self, role: str, folder: str | Path) -> None:
        """Load or replace a role's adapter. The same weights again keep their rows."""
        adapters = {**self._adapters, role: Adapter.load(folder)}
        if self.method.common_rows:
            _check_same_matrices(adapters)
        self._adapters = adapters
        self._drop_unused()

    def drop_own(self) -> None:
        """Forget all own base: roles read neutral base KV of their own turns from now on."""
        for root in self._roots.values():
            for node in root.walk():
                node.own = None

    def unload(self, role: str) -> None:
        del self._adapters[role]
        self._drop_unused()

    @torch.inference_mode()
    def turn(self, role: str | None, prompt: Sequence[int], output: Sequence[int]) -> Turn:
        """Let `role` read `prompt` and emit exactly `output`, then publish the turn."""
        if not prompt or not output:
            raise ValueError("a turn needs at least one prompt token and one output token")
        adapter = None if role is None else self._adapters[role]
        root = self._root(adapter)
        cached = root.match(prompt)
        base_len = len(cached)
        lr_len = base_len
        if adapter is not None and self._keeps_rows(adapter):
            key = self._row_key(adapter)
            lr_len = next((i for i, node in enumerate(cached) if key not in node.lr), base_len)
        compute_from = min(lr_len, len(prompt) - 1)

        tokens = [*prompt, *output[:-1]]
        result = self._forward(tokens, compute_from, adapter, cached, lr_len)
        self._publish(root, tokens, adapter, result)

        last_prompt = len(prompt) - 1 - compute_from
        log_softmax = F.linear(result.hidden[last_prompt:], self.weights.head).log_softmax(-1)
        targets = torch.tensor(output)[:, None]
        return Turn(
            logprobs=log_softmax.gather(1, targets)[:, 0],
            log_softmax=log_softmax,
            base_len=base_len,
            lr_len=lr_len,
            compute_from=compute_from,
        )

    def base_rows(self, tokens: Sequence[int], role: str | None = None) -> Tensor:
        """[cached, layers, 2, kv_heads, head_dim]; `role` matters only under nonshared."""
        adapter = None if role is None else self._adapters[role]
        return self._stack_base(self._root(adapter).match(tokens), None)

    def lr_rows(self, tokens: Sequence[int], role: str) -> dict[Slot, Tensor]:
        """The leading LR rows that `role` finds, [lr_len, rank] per (layer, projection)."""
        adapter = self._adapters[role]
        key = self._row_key(adapter)
        found: list[Tensor] = []
        for node in self._root(adapter).match(tokens):
            if key not in node.lr:
                break
            found.append(node.lr[key])
        rows = torch.stack(found) if found else torch.empty(0, len(adapter.slots), adapter.rank)
        return {slot: rows[:, index] for index, slot in enumerate(adapter.slots)}

    def _publish(
        self, root: TokenNode, tokens: list[int], adapter: Adapter | None, result: Pass
    ) -> None:
        """Store what is missing; published rows are never replaced."""
        published = root.match(tokens)
        # Own rows first: under ReBaseShared they win over those of the neutral pass.
        writer = result
        if self.method.neutral_base:
            writer = self._forward(tokens, len(published), None, published, len(published))
        path = root.insert(tokens)
        if adapter is not None and self._keeps_rows(adapter):
            key = self._row_key(adapter)
            for node, row in zip(path[result.start :], result.lr[key], strict=True):
                node.lr.setdefault(key, row)
        for index in range(len(published), len(tokens)):
            path[index].base = writer.base[index - writer.start]
            if self.method.own_base and adapter is not None:
                path[index].feeder = adapter.content
                path[index].own = result.base[index - result.start]
            if self.method.team_rows:
                for key, rows in writer.lr.items():
                    path[index].lr.setdefault(key, rows[index - writer.start])

    def _forward(
        self,
        tokens: list[int],
        start: int,
        adapter: Adapter | None,
        cached: list[TokenNode],
        lr_len: int,
    ) -> Pass:
        """Compute tokens[start:], reading base KV of all `cached` and LR rows up to `lr_len`."""
        weights = self.weights
        base_len = len(cached)
        cached_base = self._stack_base(cached, adapter)
        writers = {
            self._row_key(other): other
            for other in self._adapters.values()
            if self._keeps_rows(other)
        }

        def adapted(layer: int, projection: str, x: Tensor) -> Tensor:
            out = weights.linear(layer, projection, x)
            slot = (layer, projection)
            if adapter is not None and slot in adapter.a:
                out = out + adapter.expand(slot, x @ adapter.a[slot].T)
            return out

        # The adapter's term goes into stored keys and values, or is added where they are read.
        project_kv = adapted if self.method.full_kv else weights.linear
        visible = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()[start:]
        hidden = weights.embedding[torch.tensor(tokens[start:], dtype=torch.long)]
        new_base: list[Tensor] = []
        new_rows: dict[str, list[Tensor]] = {key: [] for key in writers}
        for layer, norms in enumerate(weights.layers):
            x = weights.norm(hidden, norms["input_layernorm.weight"])
            queries = weights.rope(weights.heads(adapted(layer, "q_proj", x)), start)
            keys = weights.rope(weights.heads(project_kv(layer, "k_proj", x)), start)
            values = weights.heads(project_kv(layer, "v_proj", x))
            new_base.append(torch.stack((keys, values), dim=1))
            for key, other in writers.items():
                new_rows[key].extend(other.rows(layer, x))

            # Cached rows win over rows computed for the same tokens.
            base = torch.cat((cached_base[:, layer], new_base[-1][base_len - start :]))
            keys, values = base.unbind(1)
            if adapter is not None and self._keeps_rows(adapter):
                key = self._row_key(adapter)
                for index, slot in enumerate(adapter.slots):
                    if slot[0] != layer:
                        continue
                    known = [node.lr[key][index] for node in cached[:lr_len]]
                    rows = torch.stack([*known, *new_rows[key][index][lr_len - start :]])
                    term = weights.heads(adapter.expand(slot, rows))
                    if slot[1] == "k_proj":
                        keys = keys + weights.rope(term, 0)
                    else:
                        values = values + term
            hidden = hidden + adapted(layer, "o_proj", _attend(queries, keys, values, visible))

            x = weights.norm(hidden, norms["post_attention_layernorm.weight"])
            gated = F.silu(adapted(layer, "gate_proj", x)) * adapted(layer, "up_proj", x)
            hidden = hidden + adapted(layer, "down_proj", gated)
        return Pass(
            start=start,
            hidden=weights.norm(hidden, weights.final_norm),
            base=torch.stack(new_base, dim=1),
            lr={key: torch.stack(rows, dim=1) for key, rows in new_rows.items()},
        )

    def _root(self, adapter: Adapter | None) -> TokenNode:
        key = adapter.content if adapter is not None and self.method.per_adapter else ""
        return self._roots.setdefault(key, TokenNode())

    def _keeps_rows(self, adapter: Adapter) -> bool:
        return bool(adapter.slots) and not self.method.full_kv

    def _row_key(self, adapter: Adapter) -> str:
        return adapter.row_matrices if self.method.common_rows else adapter.content

    def _drop_unused(self) -> None:
        """Forget the rows, and under nonshared the tries, that no loaded adapter can read."""
        adapters = self._adapters.values()
        contents = {adapter.content for adapter in adapters}
        row_keys = {self._row_key(adapter) for adapter in adapters}
        self._roots = {key: root for key, root in self._roots.items() if key in contents | {""}}
        for root in self._roots.values():
            for node in root.walk():
                node.lr = {key: rows for key, rows in node.lr.items() if key in row_keys}
                if node.feeder not in contents:
                    node.own = None

    def _stack_base(self, nodes: list[TokenNode], reader: Adapter | None) -> Tensor:
        if nodes:
            read = [
                node.base if node.own is None or reader is None or node.feeder != reader.content
                else node.own
                for node in nodes
            ]  # fmt: skip
            return torch.stack([base for base in read if base is not None])
        weights = self.weights
        kv_heads = len(weights.layers[0]["k_proj.weight"]) // weights.head_dim
        return torch.empty(0, len(weights.layers), 2, kv_heads, weights.head_dim)


def _attend(queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    """Grouped-query attention; [tokens, heads, head_dim] each, visible [queries, keys]."""
    out = F.scaled_dot_product_attention(
        queries.transpose(0, 1)[None],
        keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None],
        attn_mask=visible,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1).flatten(1)


def _check_same_matrices(adapters: Mapping[str, Adapter]) -> None:
    """BaseLRShared needs one A for all. An adapter that keeps no rows has none to compare."""
    first: dict[str, str] = {}
    for role, adapter in adapters.items():
        if adapter.slots:
            first.setdefault(adapter.row_matrices, role)
    if len(first) > 1:
        names = " and ".join(list(first.values())[:2])
        raise ValueError(
            f"baselrshared needs the same A of k_proj and v_proj in every adapter; {names} differ"
        )
