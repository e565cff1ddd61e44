"""What all tests share."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Before PyTorch starts its threads, here and in the servers that inherit it: processes
# share few cores, and a thread that waits must not hold one.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if "PYTEST_XDIST_WORKER" in os.environ:
    # Every worker has a server of its own; between them they fill the cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Kernels run in Triton's interpreter here. Triton's own functions are made for it when Triton
# is imported; ours when they are. Servers do not inherit it.
os.environ["TRITON_INTERPRET"] = "1"
import triton

del os.environ["TRITON_INTERPRET"]
triton.knobs.propagate_env = False
triton.knobs.runtime.interpret = True

import pytest
import torch
from tiny import make_adapter, make_model
from xdist.scheduler import LoadScopeScheduling

_status = pytest.ExitCode.OK


def _forget_current_test() -> None:
    """Servers that inherit the same environment are forked from one process that has SGLang
    imported; pytest's name of the current test would give each of them its own.
    """
    os.environ.pop("PYTEST_CURRENT_TEST", None)


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup() -> None:
    _forget_current_test()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call() -> None:
    _forget_current_test()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama."""
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two adapters for it."""
    root = tmp_path_factory.mktemp("adapters")
    return {
        role: make_adapter(root / role, model, seed=seed)
        for seed, role in enumerate(("plan", "action"))
    }


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small tensors, the same numbers every time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Makes an `engine.Engine`: the prefix cache without a model."""
    from engine import Engine
    from sglang.srt.runtime_context import get_context
    from standins import quiet_imports

    # SGLang's record of its arguments, which releasing a request reads.
    with quiet_imports(), get_context().override_server_args():
        yield lambda *args, **kwargs: Engine(monkeypatch, *args, **kwargs)


class _ByServer(LoadScopeScheduling):
    """With several workers, tests that share a server go to one of them, and the rest is spread."""

    def _split_scope(self, nodeid: str) -> str:
        file, _, test = nodeid.partition("::")
        name, _, parameters = test.partition("[")
        if file.endswith("test_agreement.py"):
            return f"{file} {parameters}"  # a server for each set of parameters
        if file.endswith("test_schedules.py"):
            return f"{file} {name}"
        if file.endswith("test_faults.py"):
            return nodeid
        return file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    return _ByServer(config, log)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    global _status
    _status = pytest.ExitCode(exitstatus)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    # transformers pulls in extensions one of which crashes while the interpreter is torn
    # down under pytest ("Segmentation fault", no Python frame). Everything is reported by
    # now; leave with pytest's own status. Can go when `pytest tests/test_assets.py` ends
    # with status 0 without this.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(_status)
