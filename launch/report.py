"""Tables and plots of measured runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from precache_sglang.launch.replay import Replay


def median_of(replays: Sequence[Replay]) -> dict[str, Any]:
    """Medians of one method's runs over one trace; the spread of TTFT is min and max."""
    first = replays[0]

    def peak(values: list[int | None]) -> int | None:
        found = [value for value in values if value is not None]
        return max(found) if found else None

    return {
        "num_tokens": first.num_tokens,
        "runs": len(replays),
        "ttft_ms": median(replay.ttft_ms for replay in replays),
        "ttft_ms_min": min(replay.ttft_ms for replay in replays),
        "ttft_ms_max": max(replay.ttft_ms for replay in replays),
        "total_ms": median(replay.total_ms for replay in replays),
        "total_ms_min": min(replay.total_ms for replay in replays),
        "total_ms_max": max(replay.total_ms for replay in replays),
        "shared_share": first.shared_share,
        "peak_base_bytes": peak([replay.peak_base_bytes for replay in replays]),
        "peak_lr_bytes": peak([replay.peak_lr_bytes for replay in replays]),
        "turns": [
            {**asdict(turn), "ttft_ms": median(r.turns[i].ttft_ms for r in replays)}
            for i, turn in enumerate(first.turns)
        ],
    }


def table(results: dict[str, dict[str, Any]], baseline: str = "nonshared") -> str:
    """One line per method; ratios say how many times better than `baseline`."""
    base = results.get(baseline)
    header = (
        f"{'variant':<22}{'TTFT s':>9}{'(min-max)':>16}{'ratio':>7}{'total s':>9}{'ratio':>7}"
        f"{'tokens/s':>10}{'shared':>8}{'base MiB':>10}{'LR MiB':>8}"
    )
    lines = [header, "-" * len(header)]
    for method, result in results.items():
        lines.append(
            f"{method:<22}{result['ttft_ms'] / 1e3:>9.2f}{_spread(result, 'ttft_ms'):>16}"
            f"{_ratio(base, result, 'ttft_ms'):>7}"
            f"{result['total_ms'] / 1e3:>9.2f}{_ratio(base, result, 'total_ms'):>7}"
            f"{result['num_tokens'] / result['total_ms'] * 1e3:>10.0f}"
            f"{result['shared_share']:>8.0%}"
            f"{_mib(result['peak_base_bytes']):>10}{_mib(result['peak_lr_bytes']):>8}"
        )
    return "\n".join(lines)


def table_by_trace(results: dict[str, dict[str, Any]], baseline: str = "nonshared") -> str:
    """One line per variant, one column per trace: TTFT and its ratio to `baseline`."""
    header = f"{'variant':<22}" + "".join(f"{name:>18}" for name in results)
    lines = [header, "-" * len(header)]
    for variant in _variants(results):
        line = f"{variant:<22}"
        for by_variant in results.values():
            result, base = by_variant.get(variant), by_variant.get(baseline)
            cell = "-"
            if result is not None:
                cell = f"{result['ttft_ms'] / 1e3:.2f} ({_ratio(base, result, 'ttft_ms')})"
            line += f"{cell:>18}"
        lines.append(line)
    return "\n".join(lines)


def _variants(results: dict[str, dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for by_variant in results.values() for name in by_variant))


def _ratio(base: dict[str, Any] | None, result: dict[str, Any], name: str) -> str:
    return "-" if base is None else f"{base[name] / result[name]:.2f}"


def _spread(result: dict[str, Any], name: str) -> str:
    if result["runs"] == 1:
        return "-"
    return f"({result[f'{name}_min'] / 1e3:.2f}-{result[f'{name}_max'] / 1e3:.2f})"


def _mib(value: int | None) -> str:
    return "-" if value is None else f"{value / (1 << 20):.1f}"


def plot_ttft(results: dict[str, dict[str, Any]], title: str, path: Path) -> None:
    """TTFT of every turn by method, turns named by role."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(11, 5), layout="constrained")
    markers = "osD^vP*X"
    roles: list[str] = []
    for index, (method, result) in enumerate(results.items()):
        turns = result["turns"]
        roles = [turn["role"] for turn in turns]
        axes.plot(
            range(len(turns)),
            [turn["ttft_ms"] for turn in turns],
            marker=markers[index % len(markers)],
            linewidth=1.2,
            markersize=5,
            label=method,
        )
    axes.set_xticks(range(len(roles)), roles, rotation=60, ha="right")
    axes.set_yscale("log")
    axes.set_ylabel("TTFT [ms]")
    axes.set_xlabel("turn, by role")
    axes.set_title(title)
    axes.grid(True, which="both", alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def plot_by_trace(results: dict[str, dict[str, Any]], path: Path) -> None:
    """TTFT summed over turns, and total time, over the traces; one line per variant."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    names = list(results)
    labels = (("ttft_ms", "TTFT, summed over turns [s]"), ("total_ms", "total time [s]"))
    for axes, (field, label) in zip(panels, labels, strict=True):
        for variant, marker in zip(_variants(results), "osD^vP*X" * len(results), strict=False):
            values = [results[name].get(variant) for name in names]
            seconds = [None if value is None else value[field] / 1e3 for value in values]
            axes.plot(names, seconds, marker=marker, label=variant)
        axes.set_yscale("log")
        axes.set_ylabel(label)
        axes.set_xlabel("trace")
        axes.grid(True, which="both", alpha=0.3)
    panels[0].legend()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def serving_table(rows: Sequence[dict[str, Any]]) -> str:
    """One line for each variant and load."""
    header = (
        f"{'variant':<22}{'load':<12}{'TTFT p50 s':>11}{'(min-max)':>15}{'p90':>8}{'p99':>8}"
        f"{'ITL p50 ms':>12}{'p90':>7}{'p99':>7}{'tok/s/req':>11}{'goodput/s':>11}{'shared':>8}"
        f"{'neutral':>9}{'beside':>8}{'backlog':>9}{'provis.':>9}{'drain s':>9}"
        f"{'base MiB':>10}{'LR MiB':>8}{'errors':>8}"
    )
    lines = [header, "-" * len(header)]
    for row in rows:
        spread = f"({row['ttft_p50_s_min']:.3f}-{row['ttft_p50_s_max']:.3f})"
        lines.append(
            f"{row['variant']:<22}{row['load']:<12}{row['ttft_p50_s']:>11.3f}{spread:>15}"
            f"{row['ttft_p90_s']:>8.2f}{row['ttft_p99_s']:>8.2f}"
            f"{row['itl_p50_s'] * 1e3:>12.0f}{row['itl_p90_s'] * 1e3:>7.0f}"
            f"{row['itl_p99_s'] * 1e3:>7.0f}"
            f"{row['throughput_per_request']:>11.2f}{row['goodput']:>11.2f}"
            f"{row['shared_share']:>8.0%}{row['neutral_tokens']:>9.0f}{row['neutral_beside']:>8.0f}"
            f"{row['max_backlog']:>9.0f}{row['max_provisional']:>9.0f}{row['drained_s']:>9.1f}"
            f"{_mib(row['peak_base_bytes']):>10}{_mib(row['peak_lr_bytes']):>8}{row['errors']:>8}"
        )
    return "\n".join(lines)


def plot_serving(rows: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """TTFT and per-request throughput over the load, one line for each variant."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    loads = list(dict.fromkeys(row["load"] for row in rows))
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    figure, panels = plt.subplots(1, 3, figsize=(15, 4.5), layout="constrained")
    shown = (
        ("ttft_p50_s", "TTFT p50 [s]", "log"),
        ("ttft_p99_s", "TTFT p99 [s]", "log"),
        ("throughput_per_request", "tokens/s of a request, median", "linear"),
    )
    for axes, (name, label, scale) in zip(panels, shown, strict=True):
        for variant, marker in zip(variants, "osD^vP*X" * len(variants), strict=False):
            points = {row["load"]: row[name] for row in rows if row["variant"] == variant}
            axes.plot(loads, [points.get(load) for load in loads], marker=marker, label=variant)
        axes.set_yscale(scale)
        axes.set_ylabel(label)
        axes.set_xlabel("load")
        axes.grid(True, which="both", alpha=0.3)
    panels[0].legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def fidelity_table(results: dict[str, Any]) -> str:
    """One line for each variant: NLL, top-1 agreement and KL over all, then KL by role."""
    roles = [role for role in next(iter(results.values())) if role != "all"]
    header = f"{'variant':<22}{'tokens':>8}{'NLL':>8}{'top-1':>8}{'KL':>9}"
    header += "".join(f"{'KL ' + role:>14}" for role in roles)
    lines = [header, "-" * len(header)]
    for variant, by_role in results.items():
        total = by_role["all"]
        line = f"{variant:<22}{total['tokens']:>8}{total['nll']:>8.3f}"
        line += f"{total['top1_agreement']:>8.1%}{total['kl']:>9.4f}"
        lines.append(line + "".join(f"{by_role[role]['kl']:>14.4f}" for role in roles))
    return "\n".join(lines)


def plot_fidelity(results: dict[str, Any], path: Path) -> None:
    """KL to nonshared by role, a bar for each variant."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    roles = list(next(iter(results.values())))
    shown = [variant for variant, by_role in results.items() if by_role["all"]["kl"] > 0]
    figure, axes = plt.subplots(figsize=(9, 4.5), layout="constrained")
    width = 0.8 / max(1, len(shown))
    for index, variant in enumerate(shown):
        places = [place + index * width for place in range(len(roles))]
        heights = [results[variant][role]["kl"] for role in roles]
        axes.bar(places, heights, width, label=variant, hatch=("", "//", "..", "xx")[index % 4])
    middle = 0.4 - width / 2
    axes.set_xticks([place + middle for place in range(len(roles))], roles)
    axes.set_ylabel("KL to nonshared, mean over output tokens [nats]")
    axes.grid(True, axis="y", alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
