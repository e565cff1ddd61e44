"""Steps in SGLang's resolution of server arguments, and what we refuse to combine with.

Every refusal names the setting, its value and the remedy. They are refused, not ignored,
because each of them reads or writes KV behind the prefix cache's back.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from precache_sglang.config import Settings
from precache_sglang.errors import SettingsError, UnsupportedError
from precache_sglang.methods import DEFAULT_METHOD, OFF
from precache_sglang.plugin import require_patches
from precache_sglang.tenants import read_tenants

if TYPE_CHECKING:
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext
    from sglang.srt.model_executor.cuda_graph_config import CudaGraphConfig
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

_SOURCE = "precache-sglang"

# (flag, field, is it in use?, remedy). A field absent from SGLang's record is an error.
_REFUSED: list[tuple[str, str, Callable[[Any], bool], str]] = [
    ("--tp-size", "tp_size", lambda v: v > 1, "use 1"),
    ("--pp-size", "pp_size", lambda v: v > 1, "use 1"),
    ("--dp-size", "dp_size", lambda v: v > 1, "use 1"),
    ("--dcp-size", "dcp_size", lambda v: v > 1, "use 1"),
    ("--attn-cp-size", "attn_cp_size", lambda v: v > 1, "use 1"),
    ("--page-size", "page_size", lambda v: v not in (None, 1), "use 1"),
    ("--speculative-algorithm", "speculative_algorithm", bool, "leave it out"),
    ("--disaggregation-mode", "disaggregation_mode", lambda v: v != "null", "leave it out"),
    ("--enable-hierarchical-cache", "enable_hierarchical_cache", bool, "leave it out"),
    ("--enable-lmcache", "enable_lmcache", bool, "leave it out"),
    ("--enable-flexkv", "enable_flexkv", bool, "leave it out"),
    (
        "--enable-unified-cache-external-linker",
        "enable_unified_cache_external_linker",
        bool,
        "leave it out",
    ),
    ("--enable-kv-cache-sharding", "enable_kv_cache_sharding", bool, "leave it out"),
    ("--enable-session-radix-cache", "enable_session_radix_cache", bool, "leave it out"),
    ("--enable-streaming-session", "enable_streaming_session", bool, "leave it out"),
    ("--enable-unified-memory", "enable_unified_memory", bool, "leave it out"),
    ("--enable-page-major-kv-layout", "enable_page_major_kv_layout", bool, "leave it out"),
    ("--disable-radix-cache", "disable_radix_cache", bool, "leave it out"),
    ("--enable-priority-scheduling", "enable_priority_scheduling", bool, "leave it out"),
    ("--kv-cache-dtype", "kv_cache_dtype", lambda v: v not in ("auto", "bf16"), "use auto"),
    ("--lora-backend", "lora_backend", lambda v: v == "triton_v2", "use csgmv"),
    ("--enable-lora-overlap-loading", "enable_lora_overlap_loading", bool, "leave it out"),
    ("--kv-events-config", "kv_events_config", bool, "leave it out"),
    ("--tokenizer-worker-num", "tokenizer_worker_num", lambda v: v > 1, "use 1"),
    ("--enable-mixed-chunk", "enable_mixed_chunk", bool, "leave it out"),
    # Its sampler reads positions, which neutral tokens that ride along are part of.
    (
        "--enable-deterministic-inference",
        "enable_deterministic_inference",
        bool,
        "leave it out",
    ),
    ("--enable-two-batch-overlap", "enable_two_batch_overlap", bool, "leave it out"),
    ("--enable-pdmux", "enable_pdmux", bool, "leave it out"),
    ("--dllm-algorithm", "dllm_algorithm", bool, "leave it out"),
    ("--is-embedding", "is_embedding", bool, "leave it out"),
    ("--strip-thinking-cache", "strip_thinking_cache", bool, "leave it out"),
    ("--enable-hisparse", "enable_hisparse", bool, "leave it out"),
]
_REFUSED_ENVIRONMENT = ("SGLANG_RUST_SERVER", "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING")


def before_defaults(server_args: ServerArgs, previous: Callable[[ServerArgs], None]) -> None:
    """An out-of-tree platform names its device; SGLang expects a string there."""
    from sglang.srt.arg_groups.overrides import declare_resolution
    from sglang.srt.platforms import current_platform

    if server_args.device is None and current_platform.is_out_of_tree():
        declare_resolution(server_args, _SOURCE, device=current_platform.device_type)
    previous(server_args)


def check_and_select(server_args: ServerArgs, previous: Callable[[ServerArgs], None]) -> None:
    """Settle the method, refuse what does not go with it, select our backends."""
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    previous(server_args)
    settings = Settings.of(server_args) or Settings.from_mapping({})
    config = resolving_view(server_args)
    serves_adapters = bool(config.enable_lora or config.lora_paths)
    if settings.method not in (None, OFF) and not serves_adapters:
        raise SettingsError(
            f"--precache-method {settings.method} shares KV between LoRA adapters, but none are "
            "served; add --lora-paths NAME=PATH …, or --enable-lora, or use --precache-method off."
        )
    if settings.method is None:
        settings = replace(settings, method=DEFAULT_METHOD if serves_adapters else OFF)
    settings.attach(server_args)
    if settings.policy is None:
        refuse_server_flags(settings)
        return
    require_patches()
    if settings.tenants is not None:
        read_tenants(settings.tenants, config.api_key, config.admin_api_key)
    if config.page_size not in (None, 1) and _given(server_args, "page_size") in (None, 1):
        # Chosen for the attention backend that SGLang would have taken here.
        declare_resolution(server_args, _SOURCE, page_size=1)
        config = resolving_view(server_args)
    refuse_unsupported(config)
    if config.disable_overlap_schedule is not True:
        declare_resolution(server_args, _SOURCE, disable_overlap_schedule=True)
        logger.info(
            "precache: overlap scheduling is off: LR slots and neutral passes are planned from "
            "steps that are finished, and schedule db feeds what the step before has sampled."
        )
    declare_resolution(
        server_args,
        _SOURCE,
        radix_cache_backend="precache",
        attention_backend="precache",
        prefill_attention_backend=None,
        decode_attention_backend=None,
        cuda_graph_config=_graph_config(settings, config),
    )
    logger.info("precache: method %s, schedule %s", settings.method, settings.schedule)


def _given(server_args: ServerArgs, name: str) -> Any:
    """What the operator wrote, before SGLang filled in the rest."""
    return (getattr(server_args, "_raw_input", None) or {}).get(name)


def _graph_config(settings: Settings, config: Any) -> CudaGraphConfig:
    """Graphs for decode steps where they are asked for, none for prefills.

    SGLang has read its own flags by now, so that this is the place where it says what it will
    capture.

    Raises:
        SettingsError: if graphs are asked for where there are none.
    """
    from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, with_phase

    graphs = with_phase(config.cuda_graph_config, Phase.PREFILL, backend=Backend.DISABLED)
    if not settings.cuda_graph:
        if config.device == "cuda" and graphs.decode.backend != Backend.DISABLED:
            logger.info(
                "precache: CUDA graphs are off: decode steps in graphs have not been validated "
                "on a GPU; --precache-cuda-graph turns them on."
            )
        return with_phase(graphs, Phase.DECODE, backend=Backend.DISABLED)
    if config.device != "cuda" or settings.kernels == "torch":
        raise SettingsError(
            f"--precache-cuda-graph needs a GPU and the triton kernels, but the device is "
            f"{config.device} and --precache-kernels is {settings.kernels}; leave it out."
        )
    for flag, name in (
        ("--enable-torch-compile", "enable_torch_compile"),
        ("--debug-cuda-graph", "debug_cuda_graph"),
    ):
        if getattr(config, name):
            raise SettingsError(f"--precache-cuda-graph does not work with {flag}; leave one out.")
    if graphs.decode.backend == Backend.DISABLED:
        raise SettingsError(
            "--precache-cuda-graph asks for graphs that other flags switch off; leave out "
            "--disable-cuda-graph and --cuda-graph-backend-decode disabled."
        )
    return with_phase(graphs, Phase.DECODE, backend=Backend.FULL)


def refuse_server_flags(settings: Settings) -> None:
    """Raise `SettingsError` if SGLang's server, which is left as it is, is to be limited."""
    for flag, name in (
        ("--precache-cors-origins", "cors_origins"),
        ("--precache-max-body-bytes", "max_body_bytes"),
        ("--precache-drain-timeout", "drain_timeout_s"),
        ("--precache-tenants", "tenants"),
    ):
        value = getattr(settings, name)
        if value != getattr(Settings(), name):
            raise SettingsError(
                f"{flag} {value} has no effect with --precache-method off, which leaves SGLang's "
                "server as it is; leave it out."
            )


def refuse_unsupported(config: Any) -> None:
    """Raise `UnsupportedError` for the first engine option that we cannot serve with."""
    for flag, name, in_use, remedy in _REFUSED:
        value = getattr(config, name)
        if in_use(value):
            raise UnsupportedError(
                f"{flag} {value} does not work with precache-sglang; {remedy}, or start with "
                "--precache-method off."
            )
    for name in _REFUSED_ENVIRONMENT:
        if os.environ.get(name, "").lower() in ("1", "true", "yes", "y"):
            raise UnsupportedError(
                f"{name}={os.environ[name]} does not work with precache-sglang; unset it, or "
                "start with --precache-method off."
            )


def check_engine(context: TreeCacheBuildContext) -> None:
    """Refuse models that only show once they are loaded."""
    model_config = context.model_config
    problem = None
    if context.is_hybrid_swa:
        problem = "mixes sliding-window and full attention"
    elif context.is_hybrid_ssm:
        problem = "has state-space layers"
    elif model_config.is_multimodal:
        problem = "is multimodal"
    elif model_config.is_encoder_decoder:
        problem = "is an encoder-decoder"
    elif not model_config.is_generation:
        problem = "does not generate text"
    elif "MLA" in str(model_config.attention_arch):
        problem = "uses multi-head latent attention"
    if problem:
        raise UnsupportedError(
            f"The model {problem}, which precache-sglang does not support; start with "
            "--precache-method off."
        )
