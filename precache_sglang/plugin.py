"""SGLang entry point: lists, installs and verifies what we change.

SGLang logs a plugin that fails and serves on without it. Serving adapters from a cache
that is half patched would give wrong answers, so everything here ends the process
instead (`SystemExit` is what SGLang's plugin loader lets through).
"""

from __future__ import annotations

import multiprocessing
import pkgutil
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from precache_sglang.errors import PatchError, PrecacheError

if TYPE_CHECKING:
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext

SGLANG_VERSION = "0.5.23"
BACKEND = "precache"  # name of our attention and prefix-cache backends


def install() -> None:
    """Entry point of the group ``sglang.srt.plugins``; runs once in every process."""
    try:
        _require_version()
        _register_seams()
        _register_hooks()
    except PrecacheError as error:
        raise SystemExit(f"precache-sglang: {error}") from error
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise SystemExit(
            f"precache-sglang could not install itself into SGLang {version('sglang')}: "
            f"{type(error).__name__}: {error}"
        ) from error


def _require_version() -> None:
    found = version("sglang")
    if found != SGLANG_VERSION:
        raise PatchError(
            f"SGLang {found} is installed, but this version of precache-sglang is written for "
            f"{SGLANG_VERSION}; install sglang=={SGLANG_VERSION}, or uninstall precache-sglang."
        )


def _register_seams() -> None:
    from sglang.srt.arg_groups.choices import add_attention_backend_choices
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.mem_cache.registry import register_radix_cache_backend

    from precache_sglang.resolution import before_defaults, check_and_select

    register_resolution_hook("handle_missing_default_values")(before_defaults)
    register_resolution_hook("handle_other_validations")(check_and_select)
    add_attention_backend_choices([BACKEND])
    register_attention_backend(BACKEND)(_create_attention_backend)
    register_radix_cache_backend(BACKEND, _create_prefix_cache)


def _register_hooks() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for patch in _patches_here():
        HookRegistry.register(patch.target, patch.hook, HookType(patch.kind))


def _patches_here() -> list[Any]:
    from precache_sglang.patches import all_patches

    in_main = multiprocessing.parent_process() is None
    return [patch for patch in all_patches() if in_main or not patch.main_process_only]


def missing_patches() -> list[str]:
    """Targets whose hook did not take effect in this process."""
    missing = []
    for patch in _patches_here():
        owner, _, name = patch.target.rpartition(".")
        try:
            function = getattr(pkgutil.resolve_name(owner), name)
        except (ImportError, AttributeError):
            missing.append(patch.target)
            continue
        # Each hook wraps the one before it: ours is somewhere down the chain.
        layers = []
        while function is not None:
            layers += [c.cell_contents for c in getattr(function, "__closure__", None) or ()]
            function = getattr(function, "__wrapped__", None)
        if patch.hook not in layers:
            missing.append(patch.target)
    return missing


def require_patches() -> None:
    """Raise `PatchError` unless every hook of this process is in place."""
    missing = missing_patches()
    if missing:
        raise PatchError(
            "these hooks did not take effect: "
            + ", ".join(missing)
            + f". Another plugin may have replaced them, or SGLang is not {SGLANG_VERSION}."
        )


def _create_attention_backend(runner: Any) -> Any:
    from precache_sglang.attention import create_backend
    from precache_sglang.runtime import current

    runtime = current()
    if runtime is None:
        raise PatchError(
            "the attention backend 'precache' serves LoRA agents: start with --enable-lora and a "
            "--precache-method other than off."
        )
    runtime.build_pools(runner)
    return create_backend(runner, runtime)


def _create_prefix_cache(context: TreeCacheBuildContext) -> BasePrefixCache:
    from precache_sglang.prefix_cache import PrecacheRadixCache
    from precache_sglang.resolution import check_engine
    from precache_sglang.runtime import current

    require_patches()
    check_engine(context)
    runtime = current()
    if runtime is None:
        raise PatchError("the LoRA manager was built without our hook")
    tree = PrecacheRadixCache(context.params, runtime)
    runtime.tree = tree
    # SGLang's idle check asks the allocator for violations; LR slots join in there.
    context.params.token_to_kv_pool_allocator.verify_byte_accounting = tree.check_integrity
    return tree
