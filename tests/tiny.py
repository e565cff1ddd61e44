"""Tiny random models and adapters, in the formats of transformers and PEFT.

Weights are much larger than at a usual initialisation: logits are far from uniform, and swapping
an adapter moves log-probabilities by whole units, so a comparison that mixes up rows fails.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

MODELS = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
}


def make_model(
    folder: str | Path, architecture: str = "llama", seed: int = 0, **config_overrides: Any
) -> Path:
    """Write a model folder without a tokenizer and return it."""
    settings: dict[str, Any] = {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    if architecture == "mistral":
        # Its default is a window of 4096 tokens.
        settings["sliding_window"] = None
    config_class, model_class = MODELS[architecture]
    model = model_class(config_class(**settings | config_overrides, dtype=torch.float32))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(_random_weight(name, weight, generator))
    model.save_pretrained(folder)
    return Path(folder)


def make_model_with_tokenizer(folder: str | Path, **config_overrides: Any) -> Path:
    """Write a model folder with the tokenizer and the chat template of the demo model."""
    from precache_sglang.launch.model import ensure_demo_model

    tokenizer = AutoTokenizer.from_pretrained(ensure_demo_model())
    model = make_model(folder, vocab_size=len(tokenizer), **config_overrides)
    tokenizer.save_pretrained(folder)
    return model


def _random_weight(name: str, weight: Tensor, generator: torch.Generator) -> Tensor:
    mean, std = 0.0, 1 / math.sqrt(weight.shape[-1])
    if name.endswith("norm.weight"):
        mean, std = 1.0, 0.2
    elif name.endswith(".bias"):
        std = 0.5
    elif "embed_tokens" in name:
        std = 0.3
    elif "lm_head" in name:
        std *= 2
    return mean + std * torch.randn(weight.shape, generator=generator)


def make_adapter(
    folder: str | Path,
    model_dir: str | Path,
    targets: Sequence[str] = ("q_proj", "v_proj"),
    r: int = 8,
    alpha: float = 16,
    seed: int = 0,
    share_a_with: str | Path | None = None,
    use_rslora: bool = False,
    zero_b: bool = False,
) -> Path:
    """Write a LoRA adapter with random A and B and return its folder.

    `share_a_with` is the folder of an adapter of the same rank whose A is copied for the modules
    that both adapt. `zero_b` makes an adapter that changes nothing.
    """
    config = AutoConfig.from_pretrained(model_dir)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    hidden, inner = config.hidden_size, config.intermediate_size
    heads_width = config.num_attention_heads * head_dim
    kv_width = config.num_key_value_heads * head_dim
    shapes = {  # module -> (parent, in, out)
        "q_proj": ("self_attn", hidden, heads_width),
        "k_proj": ("self_attn", hidden, kv_width),
        "v_proj": ("self_attn", hidden, kv_width),
        "o_proj": ("self_attn", heads_width, hidden),
        "gate_proj": ("mlp", hidden, inner),
        "up_proj": ("mlp", hidden, inner),
        "down_proj": ("mlp", inner, hidden),
    }
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for layer in range(config.num_hidden_layers):
        for target in targets:
            parent, in_width, out_width = shapes[target]
            prefix = f"base_model.model.model.layers.{layer}.{parent}.{target}"
            a = torch.randn(r, in_width, generator=generator) / in_width**0.5
            b = torch.randn(out_width, r, generator=generator) * 0.5 / r**0.5
            tensors[f"{prefix}.lora_A.weight"] = a
            tensors[f"{prefix}.lora_B.weight"] = torch.zeros_like(b) if zero_b else b
    if share_a_with is not None:
        other = load_file(Path(share_a_with) / "adapter_model.safetensors")
        shared = {name for name in other if name in tensors and ".lora_A." in name}
        tensors.update({name: other[name] for name in shared})

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    adapter_config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model_dir),
        "r": r,
        "lora_alpha": alpha,
        "target_modules": list(targets),
        "use_rslora": use_rslora,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(adapter_config, indent=2))
    return folder
