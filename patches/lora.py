"""sglang.srt.lora

Why: base KV must stay free of the adapter's part of K and V, and we must learn of every
adapter that comes or goes. And ``--load-format dummy`` is for models: SGLang fails on adapters.
How: the K and V rows of the LoRA B that SGLang copies into its buffers are zeroed, so
its kernels add only the query's delta. The true B is kept by `precache_sglang.roles`
and applied when rows are read.
Gone when: SGLang lets a plugin choose the slices of a stacked projection.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from precache_sglang.patches import Patch
from sglang.srt.configs.load_config import LoadConfig, LoadFormat
from sglang.srt.lora.layers import QKVParallelLinearWithLoRA
from sglang.srt.lora.lora_config import LoRAConfig
from sglang.srt.lora.lora_manager import LoRAManager
from sglang.srt.lora.lora_registry import LoRARef

from precache_sglang import runtime as runtime_module
from precache_sglang.config import Settings
from precache_sglang.errors import AdapterError
from precache_sglang.roles import require_fields, require_rank, validate_config
from precache_sglang.runtime import current


def around_manager_init(
    original: Callable[..., None],
    manager: LoRAManager,
    *args: Any,
    load_config: LoadConfig,
    **kwargs: Any,
) -> None:
    if load_config.load_format == LoadFormat.DUMMY:
        load_config = replace(load_config, load_format=LoadFormat.AUTO)
    original(manager, *args, load_config=load_config, **kwargs)
    runtime_module.create(manager)


def after_load(
    result: Any, manager: LoRAManager, lora_ref: LoRARef, *_args: Any, **_kwargs: Any
) -> Any:
    runtime = current()
    if runtime is None:
        return None
    name = lora_ref.lora_name
    if not result.success:
        # SGLang passes on the bare text of whatever exception ended the loading.
        text = result.error_message or "SGLang gave no reason"
        if repr(name) in text:
            return None
        where = "" if str(lora_ref.lora_path) in text else f" from {lora_ref.lora_path!r}"
        message = f"Adapter {name!r}{where} was not loaded: {text}"
        return manager.create_lora_update_result(success=False, error_message=message)
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


def _settings() -> Settings | None:
    from sglang.srt.runtime_context import get_server_args

    settings = Settings.of(get_server_args())
    return None if settings is None or settings.policy is None else settings


def around_get_lora_config(
    original: Callable[..., Any], lora_config: LoRAConfig, *args: Any, **kwargs: Any
) -> Any:
    if _settings() is None:
        return original(lora_config, *args, **kwargs)
    path = str(lora_config.path)
    if os.path.isabs(path) and not os.path.isdir(path):
        # SGLang would take it for a repository's name.
        raise AdapterError(f"{path} is not a folder on the server's machine.")
    config = original(lora_config, *args, **kwargs)
    require_fields(path, config)
    return config


def before_validate_new_adapter(
    manager: LoRAManager, lora_config: LoRAConfig, lora_ref: LoRARef
) -> None:
    from sglang.srt.runtime_context import get_server_args

    settings = _settings()
    if settings is None or settings.policy is None:
        return
    if not lora_ref.lora_name:
        raise AdapterError("An adapter needs a name: requests select it by that.")
    server_args = get_server_args()
    if lora_ref.lora_name == (server_args.served_model_name or server_args.model_path):
        raise AdapterError(
            f"An adapter cannot be named {lora_ref.lora_name!r} like the served model: no request "
            "could tell them apart. Give another name."
        )
    if (pool := getattr(manager, "memory_pool", None)) is not None:  # else at start-up
        require_rank(lora_ref.lora_name, lora_config.r, pool.max_lora_rank)
    model_config = manager.base_hf_config
    has_qk_norm = "Qwen3" in "".join(getattr(model_config, "architectures", None) or ())
    validate_config(lora_ref.lora_name, lora_config.hf_config, settings.policy, has_qk_norm)


def after_slice_lora_b_weights(
    result: torch.Tensor, layer: QKVParallelLinearWithLoRA, _b: torch.Tensor
) -> torch.Tensor | None:
    runtime = current()
    if runtime is None or not runtime.method.base_kv:
        return None
    result[layer.base_layer.q_proj_shard_size :] = 0
    return result


_MANAGER = "sglang.srt.lora.lora_manager.LoRAManager"
_CONFIG = "sglang.srt.lora.lora_config.LoRAConfig"
PATCHES = [
    Patch(f"{_MANAGER}.__init__", "around", around_manager_init),
    Patch(f"{_MANAGER}.load_lora_adapter", "after", after_load),
    Patch(f"{_MANAGER}.load_lora_adapter_from_tensors", "after", after_load),
    Patch(f"{_MANAGER}.unload_lora_adapter", "after", after_unload),
    Patch(f"{_MANAGER}.validate_new_adapter", "before", before_validate_new_adapter),
    Patch(f"{_CONFIG}.get_lora_config", "around", around_get_lora_config),
    Patch(
        "sglang.srt.lora.layers.QKVParallelLinearWithLoRA.slice_lora_b_weights",
        "after",
        after_slice_lora_b_weights,
    ),
]
