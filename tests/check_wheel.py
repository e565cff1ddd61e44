"""Build the wheel, unpack it elsewhere, import and type-check every module from there.

An editable install sees the whole checkout; only the wheel shows a package that is
missing from ``pyproject.toml`` or data that is not packed. And type checkers cannot see
through the folder mapping.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
IMPORT_ALL = """
import importlib, pkgutil, sys
sys.path.insert(0, sys.argv[1])
import precache_sglang
assert precache_sglang.__file__.startswith(sys.argv[1]), precache_sglang.__file__
names = [m.name for m in pkgutil.walk_packages(precache_sglang.__path__, "precache_sglang.")]
for name in names:
    importlib.import_module(name)
from precache_sglang.launch.model import demo_adapters
from precache_sglang.launch.traces import trace_names
from precache_sglang.launch.trajectories import load_trajectories
assert "precache_sglang.launch.examples.plan_action_reflect" in names
assert len(demo_adapters()) == 3 and len(trace_names()) == 11 and len(load_trajectories()) >= 3
print(f"{len(names)} modules import from the wheel")
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, "-m", "build", "--wheel", "--outdir", folder, str(ROOT)],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        (wheel,) = Path(folder).glob("*.whl")
        site = Path(folder) / "site"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
        subprocess.run([sys.executable, "-c", IMPORT_ALL, str(site)], check=True, cwd=folder)
        config = ROOT / "pyproject.toml"
        subprocess.run(
            [sys.executable, "-m", "mypy", "--config-file", str(config), "-p", "precache_sglang"],
            check=True,
            cwd=folder,
            env={**os.environ, "MYPYPATH": str(site)},
        )


if __name__ == "__main__":
    main()
