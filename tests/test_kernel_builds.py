"""Every kernel compiles for GPUs that are not here, and what it needs of them is known."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "kernels/bench/resources.py"
LARGEST_SHARED = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # bytes per block


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_every_configuration_compiles_without_spills(arch: int, tmp_path: Path) -> None:
    path = tmp_path / "resources.json"
    result = subprocess.run(
        [sys.executable, str(SCRIPT), "--quick", "--arch", str(arch), "--json", str(path)],
        capture_output=True,
        text=True,
        env={k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"},
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    builds = json.loads(path.read_text())
    assert len(builds) >= 50
    assert {build["kernel"] for build in builds} == {"extend", "decode", "join", "write"}
    for build in builds:
        assert not build["error"]
        assert 0 < build["registers"] <= 255
        assert build["shared_bytes"] <= LARGEST_SHARED[arch]
        if build["head_dim"] in (64, 128, None):
            assert build["spill_bytes"] == 0, build
