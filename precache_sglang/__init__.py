"""Share one KV cache between LoRA agents on SGLang."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from precache_sglang.engine import Engine

__version__ = "0.1.0"
__all__ = ["Engine", "__version__"]


def __getattr__(name: str) -> Any:
    # SGLang imports this package in every process to find the plugin; the engine
    # pulls in all of SGLang.
    if name == "Engine":
        from precache_sglang.engine import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
