"""Offline engine: ``sglang.Engine`` with our settings as keyword arguments."""

from __future__ import annotations

from typing import Any

from sglang.srt.entrypoints.engine import Engine as SGLangEngine
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs

from precache_sglang.config import Settings


class Engine(SGLangEngine):
    """SGLang's offline engine with a shared KV cache.

    Takes SGLang's keyword arguments, and ours: ``precache_method``,
    ``precache_schedule``, ``precache_lr_tokens``, ``precache_team``
    (``{"team": ["role", …]}``), ``precache_max_neutral_wait``, ``precache_metrics_roles``.

    Raises:
        SettingsError, UnsupportedError: as the server does at start-up.

    Example::

        engine = Engine(model_path=path, lora_paths={"plan": a, "action": b})
        engine.generate("…", {"max_new_tokens": 16}, lora_path="plan")
    """

    def __init__(self, **kwargs: Any) -> None:
        load_plugins()
        ours = {name: kwargs.pop(name) for name in list(kwargs) if name.startswith("precache_")}
        settings = Settings.from_mapping(ours)
        unknown = sorted(set(ours) - {f"precache_{name}" for name in _KEYWORDS})
        if unknown:
            raise TypeError(f"Engine() got unknown keyword arguments: {', '.join(unknown)}")
        if "server_args" not in kwargs:
            kwargs.setdefault("log_level", "error")
            kwargs = {"server_args": ServerArgs(**kwargs)}
        settings.attach(kwargs["server_args"])
        super().__init__(**kwargs)

    def precache_state(self) -> dict[str, Any]:
        """What ``GET /precache/state`` reports; empty where precache is off."""
        (internal, *_) = self.loop.run_until_complete(self.tokenizer_manager.get_internal_state())
        state: dict[str, Any] = internal.get("precache", {})
        return state


_KEYWORDS = ("method", "schedule", "lr_tokens", "team", "max_neutral_wait", "metrics_roles")
