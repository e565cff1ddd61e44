"""``precache-sglang doctor``: what was found here, and what keeps the server from starting.

Exit status 1 if something essential is wrong; every problem comes with its remedy.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Any

from precache_sglang.methods import METHODS
from precache_sglang.plugin import BACKEND, SGLANG_VERSION, missing_patches
from precache_sglang.schedules import SCHEDULES

PACKAGES = ("torch", "triton", "flashinfer-python", "transformers", "sglang", "precache-sglang")
GROUPS = ("sglang.srt.plugins", "sglang.srt.platforms")
# What the model section counts with: the shape of the adapters that this project ships.
RANK, NUM_ADAPTERS = 8, 3


@dataclass
class Problem:
    what: str
    remedy: str


@dataclass
class Report:
    """Everything that is printed.

    Attributes:
        hooks: Target of every hook of ours to whether it is in place.
        model: None unless a model was asked for.
    """

    platform: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str | None] = field(default_factory=dict)
    entry_points: dict[str, str | None] = field(default_factory=dict)
    hooks: dict[str, bool] = field(default_factory=dict)
    backends: dict[str, bool] = field(default_factory=dict)
    architectures: list[str] = field(default_factory=list)
    methods: dict[str, str] = field(default_factory=dict)
    schedules: list[str] = field(default_factory=list)
    model: dict[str, Any] | None = None
    problems: list[Problem] = field(default_factory=list)

    def problem(self, what: str, remedy: str) -> None:
        self.problems.append(Problem(what, remedy))


def doctor(argv: Sequence[str]) -> None:
    """Print the report. Raises `SystemExit` with status 1 if it holds a problem."""
    parser = argparse.ArgumentParser(prog="precache-sglang doctor", description=__doc__)
    parser.add_argument("--model-path", help="model folder to check, too")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    with _quiet():
        report = examine(args.model_path)
    print(json.dumps(asdict(report), indent=2) if args.json else as_text(report))
    if report.problems:
        raise SystemExit(1)


def examine(model_path: str | None = None) -> Report:
    """Look around in this process, which loads SGLang and our plugin for it."""
    report = Report(
        methods={method.name: method.summary for method in METHODS.values()},
        schedules=list(SCHEDULES),
    )
    _examine_versions(report)
    if report.versions["sglang"] is not None:
        _examine_plugin(report)
        _examine_platform(report)
        _examine_backends(report)
    if model_path is not None:
        _examine_model(report, model_path)
    return report


def _examine_versions(report: Report) -> None:
    report.versions["python"] = platform.python_version()
    for package in PACKAGES:
        try:
            report.versions[package] = version(package)
        except PackageNotFoundError:
            report.versions[package] = None
    found = report.versions["sglang"]
    if found != SGLANG_VERSION:
        report.problem(
            f"SGLang {found or '(none)'} is installed, but the hooks are written for "
            f"{SGLANG_VERSION}.",
            f"pip install sglang=={SGLANG_VERSION}",
        )


def _examine_plugin(report: Report) -> None:
    from sglang.srt.plugins import load_plugins

    for group in GROUPS:
        values = [e.value for e in entry_points(group=group) if "precache_sglang." in e.value]
        report.entry_points[group] = values[0] if values else None
        if not values:
            report.problem(
                f"No entry point of ours in the group {group}: SGLang cannot find the plugin.",
                "pip install precache-sglang (or, in a checkout, pip install -e .)",
            )
    try:
        load_plugins()
    except SystemExit as error:
        # The plugin's own refusal. A wrong version is reported already.
        if report.versions["sglang"] == SGLANG_VERSION:
            report.problem(str(error), "do what the message says")
    from precache_sglang.patches import all_patches

    missing = missing_patches()
    report.hooks = {patch.target: patch.target not in missing for patch in all_patches()}
    if missing and report.versions["sglang"] == SGLANG_VERSION:
        filters = [
            f"{name}={os.environ[name]}"
            for name in ("SGLANG_PLUGINS", "SGLANG_PLATFORM")
            if os.environ.get(name)
        ]
        report.problem(
            f"{len(missing)} of {len(report.hooks)} hooks did not take effect.",
            f"unset {' and '.join(filters)}, which may leave our plugin out"
            if filters
            else "look for another plugin that replaces what we hook, and for errors above",
        )


def _examine_platform(report: Report) -> None:
    import torch

    about = report.platform
    about["system"] = f"{platform.system()} {platform.release()} {platform.machine()}"
    about["cpu"] = f"{_cpu_name()}, {os.cpu_count()} cores"
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    about["gpu"] = ", ".join(gpus) or "none"
    try:
        from sglang.srt.platforms import current_platform

        about["sglang platform"] = type(_resolved(current_platform)).__name__
    except (ImportError, RuntimeError) as error:
        about["sglang platform"] = "none"
        report.problem(
            f"SGLang finds no platform: {error}", "unset SGLANG_PLATFORM, or name one of the above"
        )


def _resolved(current_platform: Any) -> Any:
    current_platform.device_name  # noqa: B018 - SGLang looks for the platform on first use
    return current_platform


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"


def _examine_backends(report: Report) -> None:
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.mem_cache.registry import registered_radix_cache_backends

    report.backends = {
        "attention": BACKEND in ATTENTION_BACKENDS,
        "prefix cache": BACKEND in registered_radix_cache_backends(),
    }
    if report.versions["sglang"] == SGLANG_VERSION:
        from precache_sglang.attention import SUPPORTED_ARCHITECTURES

        report.architectures = list(SUPPORTED_ARCHITECTURES)
    missing = [kind for kind, registered in report.backends.items() if not registered]
    # Without hooks the plugin did not run at all, which is reported already.
    if missing and all(report.hooks.values()):
        report.problem(
            f"The {' and '.join(missing)} backend {BACKEND!r} is not registered.",
            f"pip install --force-reinstall sglang=={SGLANG_VERSION} precache-sglang",
        )


def _examine_model(report: Report, path: str) -> None:
    import torch
    from transformers import AutoConfig

    report.model = {"path": path}
    if os.path.isabs(path) and not os.path.isdir(path):
        report.problem(f"{path} is not a folder.", "give the folder that holds config.json")
        return
    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        first_line = str(error).strip().splitlines()[0]
        report.problem(f"{path}: {first_line}", "give the folder that holds config.json")
        return
    architecture = (config.architectures or ["none"])[0]
    report.model["architecture"] = architecture
    if architecture not in report.architectures:
        report.problem(
            f"{path}: architecture {architecture} is not supported.",
            f"use one of {', '.join(report.architectures)}, or --precache-method off",
        )
        return
    dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.bfloat16
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    layers = config.num_hidden_layers
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    kv_bytes = 2 * layers * kv_heads * head_dim * dtype.itemsize
    lr_bytes = NUM_ADAPTERS * RANK * layers * dtype.itemsize
    report.model |= {
        "dtype": str(dtype).removeprefix("torch."),
        "kv_bytes_per_token": kv_bytes,
        "lr_bytes_per_token": lr_bytes,
        "lr_bytes_per_token_with_keys": 2 * lr_bytes,
        "lr_to_kv": round(lr_bytes / kv_bytes, 4),
        # nonshared keeps the whole KV for every role.
        "shared_to_nonshared": round((kv_bytes + lr_bytes) / (NUM_ADAPTERS * kv_bytes), 4),
    }


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """SGLang warns about kernels that this machine lacks, and some of it prints."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
        warnings.simplefilter("ignore")
        yield


# -- text --------------------------------------------------------------------


def as_text(report: Report) -> str:
    lines: list[str] = []

    def section(title: str, rows: dict[str, str]) -> None:
        if rows:
            width = max(len(name) for name in rows)
            lines.extend([title, *(f"  {n:<{width}}  {value}" for n, value in rows.items()), ""])

    section("Platform", report.platform)
    versions = {name: found or "not installed" for name, found in report.versions.items()}
    versions["sglang"] += f" (expected {SGLANG_VERSION})"
    section("Versions", versions)
    section("Entry points", {g: value or "missing" for g, value in report.entry_points.items()})
    section(
        f"Hooks ({sum(report.hooks.values())} of {len(report.hooks)} in place)",
        {
            target.removeprefix("sglang.srt."): "in place" if here else "MISSING"
            for target, here in report.hooks.items()
        },
    )
    section(
        f"Backends named {BACKEND!r}",
        {kind: "registered" if here else "MISSING" for kind, here in report.backends.items()},
    )
    section("Methods", report.methods)
    section(
        "Support",
        {
            "schedules": ", ".join(report.schedules),
            "architectures": ", ".join(report.architectures) or "unknown",
        },
    )
    if report.model is not None:
        section("Model", _model_rows(report.model))
    if not report.problems:
        return "\n".join([*lines, "No problems."])
    lines.append("Problems")
    for problem in report.problems:
        lines += [f"  - {problem.what}", f"    Remedy: {problem.remedy}"]
    return "\n".join(lines)


def _model_rows(model: dict[str, Any]) -> dict[str, str]:
    rows: dict[str, str] = {
        name: str(model[name]) for name in ("path", "architecture", "dtype") if name in model
    }
    if "kv_bytes_per_token" in model:
        rows["KV"] = f"{model['kv_bytes_per_token']:,} bytes per token"
        rows["LR rows"] = (
            f"{model['lr_bytes_per_token']:,} bytes per token for {NUM_ADAPTERS} adapters of rank "
            f"{RANK} ({model['lr_bytes_per_token_with_keys']:,} where they adapt k_proj)"
        )
        rows["LR to KV"] = f"{model['lr_to_kv']:.1%}"
        rows["shared"] = f"{model['shared_to_nonshared']:.1%} of what nonshared keeps"
    return rows
