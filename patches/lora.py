"""sglang.srt.lora

Why: base KV must stay free of the adapter's part of K and V, and we must learn of every
adapter that comes or goes.
How: the K and V rows of the LoRA B that SGLang copies into its buffers are zeroed, so
its kernels add only the query's delta. The true B is kept by `precache_sglang.roles`
and applied when rows are read.
Gone when: SGLang lets a plugin choose the slices of a stacked projection.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.lora.layers import QKVParallelLinearWithLoRA
from sglang.srt.lora.lora_config import LoRAConfig
from sglang.srt.lora.lora_manager import LoRAManager
from sglang.srt.lora.lora_registry import LoRARef

from precache_sglang import runtime as runtime_module
from precache_sglang.config import Settings
from precache_sglang.errors import AdapterError
from precache_sglang.patches import Patch
from precache_sglang.roles import validate_config
from precache_sglang.runtime import current


def after_manager_init(_result: None, manager: LoRAManager, *_args: Any, **_kwargs: Any) -> None:
    runtime_module.create(manager)


def after_load(
    result: Any, manager: LoRAManager, lora_ref: LoRARef, *_args: Any, **_kwargs: Any
) -> Any:
    runtime = current()
    if runtime is None or not result.success:
        return None
    try:
        runtime.sync_adapters()
    except AdapterError as error:
        manager._unload_lora_adapter(lora_ref)
        return manager.create_lora_update_result(success=False, error_message=str(error))
    return None


def after_unload(_result: Any, _manager: LoRAManager, _lora_ref: LoRARef) -> None:
    runtime = current()
    if runtime is not None:
        runtime.sync_adapters()


def before_validate_new_adapter(
    manager: LoRAManager, lora_config: LoRAConfig, lora_ref: LoRARef
) -> None:
    from sglang.srt.runtime_context import get_server_args

    settings = Settings.of(get_server_args())
    if settings is None or settings.policy is None:
        return
    model_config = manager.base_hf_config
    has_qk_norm = "Qwen3" in "".join(getattr(model_config, "architectures", None) or ())
    validate_config(
        lora_ref.lora_name or "", lora_config.hf_config, settings.policy, has_qk_norm
    )


def after_slice_lora_b_weights(
    result: torch.Tensor, layer: QKVParallelLinearWithLoRA, _b: torch.Tensor
) -> torch.Tensor | None:
    runtime = current()
    if runtime is None or not runtime.method.base_kv:
        return None
    result[layer.base_layer.q_proj_shard_size :] = 0
    return result


_MANAGER = "sglang.srt.lora.lora_manager.LoRAManager"
PATCHES = [
    Patch(f"{_MANAGER}.__init__", "after", after_manager_init),
    Patch(f"{_MANAGER}.load_lora_adapter", "after", after_load),
    Patch(f"{_MANAGER}.load_lora_adapter_from_tensors", "after", after_load),
    Patch(f"{_MANAGER}.unload_lora_adapter", "after", after_unload),
    Patch(f"{_MANAGER}.validate_new_adapter", "before", before_validate_new_adapter),
    Patch(
        "sglang.srt.lora.layers.QKVParallelLinearWithLoRA.slice_lora_b_weights",
        "after",
        after_slice_lora_b_weights,
    ),
]
