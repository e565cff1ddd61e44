"""What all tests share."""

from __future__ import annotations

import os
import sys

# Before PyTorch starts its threads, here and in the servers that inherit it: two processes
# share few cores, and a thread that waits must not hold one.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest

_status = pytest.ExitCode.OK


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
