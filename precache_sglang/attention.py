"""Attention backend ``precache``: extend and decode over base KV and LR rows.

One backend serves every method, so that comparisons between methods measure sharing and
nothing else: a method that stores complete KV has no rows to add. Two implementations of it,
chosen by ``--precache-kernels``: `torch_attention` for CPUs, `triton_attention` for GPUs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from precache_sglang.errors import SettingsError, UnsupportedError
from precache_sglang.runtime import Runtime

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

NAME = "precache"

# Architectures whose keys are a plain projection, rotated and stored.
SUPPORTED_ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Ministral3ForCausalLM",
    "Qwen2ForCausalLM",
)


class PrecacheAttnBackend(AttentionBackend):
    """What both implementations share: pools, and the hooks on the model.

    Args:
        write_rows: Computes and stores LR rows; see `precache_sglang.kernels.reference`.
    """

    def __init__(
        self, runner: ModelRunner, runtime: Runtime, write_rows: Callable[..., None]
    ) -> None:
        super().__init__()
        self.runtime = runtime
        self.req_to_token = runner.req_to_token_pool.req_to_token
        self.kv_pool = runner.token_to_kv_pool
        self.rotary = _prepare_model(runner.model, runtime, write_rows)

    def support_triton(self) -> bool:
        return False

    def store(
        self, layer: RadixAttention, forward_batch: ForwardBatch, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        self.kv_pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc), k, v)


def create_backend(runner: ModelRunner, runtime: Runtime) -> PrecacheAttnBackend:
    """The implementation that ``--precache-kernels`` names.

    Raises:
        SettingsError: if it does not run on this device.
    """
    on_gpu = torch.device(runner.device).type == "cuda"
    if runtime.kernels == "auto":
        runtime.kernels = "triton" if on_gpu else "torch"
    if runtime.kernels == "torch":
        if on_gpu:
            raise SettingsError(
                "--precache-kernels torch runs on operators that a GPU lacks; use triton, or start "
                "with --precache-method off."
            )
        from precache_sglang.torch_attention import TorchAttnBackend

        return TorchAttnBackend(runner, runtime)
    if not on_gpu and os.environ.get("TRITON_INTERPRET") != "1":
        raise SettingsError(
            f"--precache-kernels triton needs a GPU, but the device is {runner.device}; use "
            "--precache-kernels torch, or, to test the kernels, set TRITON_INTERPRET=1."
        )
    from precache_sglang.triton_attention import TritonAttnBackend

    return TritonAttnBackend(runner, runtime)


def _prepare_model(
    model: torch.nn.Module, runtime: Runtime, write_rows: Callable[..., None]
) -> dict[int, Any]:
    """Store LR rows at every attention layer's input; return layer id to rotary module.

    The input of ``qkv_proj`` is what the LoRA A matrices multiply. A forward pre-hook
    sees it on every path, LoRA active or not.

    Raises:
        UnsupportedError: if the model is not one whose base keys can be shared.
    """
    architecture = type(model).__name__
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise UnsupportedError(
            f"Model architecture {architecture} is not supported by precache-sglang (supported: "
            f"{', '.join(SUPPORTED_ARCHITECTURES)}). Use --precache-method off."
        )
    rotary: dict[int, Any] = {}
    for name, module in model.named_modules():
        attn = getattr(module, "attn", None)
        if not isinstance(attn, RadixAttention):
            continue
        _require_plain(name, module, attn)
        layer_id = attn.layer_id
        rotary[layer_id] = module.rotary_emb
        if runtime.method.base_kv:
            module.qkv_proj.register_forward_pre_hook(
                lambda _module, args, layer_id=layer_id: runtime.store_rows(
                    layer_id, args[0], write_rows
                )
            )
    model.logits_processor.register_forward_pre_hook(
        lambda _module, args: _users_only(runtime, *args)
    )
    if len(rotary) != runtime.num_layers:
        raise UnsupportedError(
            f"Found {len(rotary)} attention layers, the model's config says {runtime.num_layers}."
        )
    return rotary


def _users_only(
    runtime: Runtime, input_ids: torch.Tensor, hidden_states: torch.Tensor, *rest: Any
) -> tuple[Any, ...]:
    """Neutral spans end here: logits, sampling and logprobs are of users' tokens only."""
    if runtime.neutral_spans:
        input_ids = input_ids[: runtime.num_user_tokens]
        hidden_states = hidden_states[: runtime.num_user_tokens]
    return input_ids, hidden_states, *rest


def _require_plain(name: str, module: torch.nn.Module, attn: RadixAttention) -> None:
    problem = None
    if not hasattr(module, "qkv_proj") or not hasattr(module, "rotary_emb"):
        problem = "has no qkv_proj or rotary_emb"
    elif (attn.sliding_window_size or -1) > -1:
        problem = f"has a sliding window of {attn.sliding_window_size}"
    elif attn.logit_cap:
        problem = f"caps logits at {attn.logit_cap}"
    elif attn.is_cross_attention or attn.attn_type != AttentionType.DECODER:
        problem = f"is not causal self-attention ({attn.attn_type})"
    elif attn.qk_head_dim != attn.v_head_dim:
        problem = f"has key size {attn.qk_head_dim} and value size {attn.v_head_dim}"
    if problem:
        raise UnsupportedError(
            f"Attention layer {name} {problem}, which precache-sglang does not support. "
            "Use --precache-method off."
        )
