"""What we change in SGLang: one file per SGLang module, each hook with its reason.

Seams that SGLang offers (registries, overridable steps) are used where they exist; see
`precache_sglang.plugin`. A hook here is for what has no seam.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Patch:
    """One hook.

    Attributes:
        target: Dotted path of the SGLang function or method.
        kind: ``"around"``, ``"after"`` or ``"before"``, as in SGLang's `HookType`.
        hook: Our function; arguments as SGLang's hook registry passes them.
        main_process_only: The target's module is too heavy to import elsewhere.
    """

    target: str
    kind: str
    hook: Callable[..., Any]
    main_process_only: bool = False


def all_patches() -> list[Patch]:
    """The ``PATCHES`` of every module in this package."""
    patches: list[Patch] = []
    for module in pkgutil.iter_modules(__path__):
        patches += importlib.import_module(f"{__name__}.{module.name}").PATCHES
    return patches
