"""SGLang on a CPU without CUDA libraries: the development and demo target.

SGLang's in-tree CPU path needs its compiled CPU kernels (`sgl-kernel`). This
out-of-tree platform runs the same models on plain PyTorch instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs


def activate() -> str | None:
    """Entry point of the group ``sglang.srt.platforms``.

    Returns the platform class on a machine without an accelerator, else None: two
    active platforms are an error in SGLang, and on a GPU its own is the right one.
    """
    if torch.cuda.is_available() or (hasattr(torch, "xpu") and torch.xpu.is_available()):
        return None
    return "precache_sglang.platform.PurePyTorchCpuPlatform"


def is_active() -> bool:
    """Whether SGLang runs on `PurePyTorchCpuPlatform`."""
    from sglang.srt.platforms import current_platform

    return isinstance(current_platform, PurePyTorchCpuPlatform)


class PurePyTorchCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """Device ``cpu`` on PyTorch operators alone."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"

    def is_pin_memory_available(self, device: Any = None) -> bool:
        return False

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def apply_server_args_defaults(self, server_args: ServerArgs) -> None:
        # The other LoRA backends are Triton kernels, and graphs and the overlap
        # scheduler need device streams.
        server_args.lora_backend = "torch_native"
        server_args.sampling_backend = "pytorch"
        server_args.disable_cuda_graph = True
        server_args.disable_overlap_schedule = True
        # An idle scheduler polls without a pause. On a CPU that is a core the model lacks.
        server_args.sleep_on_idle = True

    def init_backend(self) -> None:
        # SGLang's LoRA layers pin host tensors unconditionally. There is no device
        # to pin them for, and PyTorch refuses the call.
        _ignore_pin_memory()


def _ignore_pin_memory() -> None:
    """Make ``pin_memory=True`` a no-op in tensor factories and `Tensor.pin_memory`."""
    torch.Tensor.pin_memory = lambda self, *_a, **_k: self
    for name in ("tensor", "empty", "zeros", "ones", "full", "arange", "empty_like", "zeros_like"):
        original = getattr(torch, name)

        def without_pinning(*args: Any, _original: Any = original, **kwargs: Any) -> torch.Tensor:
            kwargs.pop("pin_memory", None)
            return _original(*args, **kwargs)

        setattr(torch, name, without_pinning)
