"""Light stand-ins for what SGLang hands to us, and a quiet way to import SGLang."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch


@contextmanager
def quiet_imports() -> Iterator[None]:
    """SGLang and its dependencies warn as they are imported; our tests take warnings for errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def fake_lora(
    seed: int = 0,
    rank: int = 2,
    targets: Sequence[str] = ("q_proj", "v_proj"),
    num_layers: int = 2,
    hidden: int = 8,
    kv_size: int = 4,
    alpha: float | None = None,
    a_seed: int | None = None,
    use_rslora: bool = False,
) -> Any:
    """The parts of SGLang's ``LoRAAdapter`` that we read, with random weights.

    q, k and v are stacked under ``qkv_proj`` as SGLang does it on loading: A to ``[3r,
    hidden]``, B to ``[q + 2 kv, r]``, zeros where k_proj is not adapted. `a_seed` gives two
    adapters of different `seed` one A.
    """
    generator = torch.Generator().manual_seed(seed)
    a_generator = generator if a_seed is None else torch.Generator().manual_seed(a_seed)
    alpha = 2 * rank if alpha is None else alpha
    layers = []
    for layer in range(num_layers):
        parent = f"base_model.model.model.layers.{layer}"
        weights: dict[str, torch.Tensor] = {}
        if "v_proj" in targets:
            a = torch.randn(3, rank, hidden, generator=a_generator)
            b = [
                torch.randn(size, rank, generator=generator) for size in (hidden, kv_size, kv_size)
            ]
            if "k_proj" not in targets:
                a[1] = 0
                b[1] = torch.zeros_like(b[1])
            name = f"{parent}.self_attn.qkv_proj"
            weights[f"{name}.lora_A.weight"] = a.reshape(3 * rank, hidden)
            weights[f"{name}.lora_B.weight"] = torch.cat(b)
        for module in ("o_proj", "down_proj"):
            if module in targets:
                name = f"{parent}.{module}"
                weights[f"{name}.lora_A.weight"] = torch.randn(rank, hidden, generator=generator)
                weights[f"{name}.lora_B.weight"] = torch.randn(hidden, rank, generator=generator)
        layers.append(SimpleNamespace(weights=weights))
    config = SimpleNamespace(
        r=rank,
        lora_alpha=alpha,
        target_modules=list(targets),
        hf_config={"use_rslora": use_rslora},
    )
    return SimpleNamespace(scaling=alpha / rank, config=config, layers=layers)


def fake_lora_pool(
    max_rank: int = 8, num_layers: int = 3, hidden: int = 8, kv_size: int = 4
) -> Any:
    """The parts of SGLang's ``LoRAMemoryPool`` that we read: the shapes of its buffers."""
    outputs = {"qkv_proj": hidden + 2 * kv_size, "o_proj": hidden, "down_proj": hidden}
    return SimpleNamespace(
        max_lora_rank=max_rank,
        A_buffer={
            module: [torch.empty(1, (3 if module == "qkv_proj" else 1) * max_rank, hidden)]
            * num_layers
            for module in outputs
        },
        B_buffer={
            module: [torch.empty(1, width, max_rank)] * num_layers
            for module, width in outputs.items()
        },
    )


def fake_lora_manager(
    loras: dict[str, Any],
    num_layers: int = 2,
    hidden: int = 8,
    kv_size: int = 4,
    max_rank: int = 8,
) -> Any:
    """The parts of SGLang's ``LoRAManager`` that we read; an adapter's id is its name."""
    return SimpleNamespace(
        base_hf_config=SimpleNamespace(
            num_hidden_layers=num_layers,
            hidden_size=hidden,
            num_attention_heads=hidden // kv_size,
            num_key_value_heads=1,
        ),
        dtype=torch.float32,
        device="cpu",
        target_modules={"qkv_proj"},
        max_lora_rank=max_rank,
        max_loras_per_batch=8,
        memory_pool=fake_lora_pool(max_rank, num_layers, hidden, kv_size),
        loras=dict(loras),
        lora_refs={name: SimpleNamespace(lora_name=name) for name in loras},
    )
