"""A server as a child process: started, waited for, asked, stopped."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from precache_sglang.launch.keys import bearer
from precache_sglang.launch.template import Forked, template_for

# Set for a server that must not outlive the process that started it.
DIE_WITH_PARENT = "PRECACHE_DIE_WITH_PARENT"

# Traces run past the demo model's trained context; speed does not depend on what it says.
LONG_CONTEXT = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}

# Never through a proxy: every address is this machine's.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ServerError(RuntimeError):
    """The server did not start, or answered with an error; the message says which."""


class ServerProcess:
    """``precache-sglang serve`` on a local port, a free one unless `port` is given.

    Use as a context manager. Its output goes to a temporary log whose end is part of
    every error message. `api_key` goes with every request. Without `own_command` it is
    SGLang's ``python -m sglang.launch_server``, which our plugin has to find its way into.
    """

    def __init__(
        self,
        model: Path | str,
        adapters: Mapping[str, Path | str] | None = None,
        args: list[str] | None = None,
        env: Mapping[str, str] | None = None,
        start_timeout: float = 300.0,
        port: int | None = None,
        api_key: str | None = None,
        own_command: bool = True,
    ) -> None:
        self.port = port or _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        flags = ["--model-path", str(model), "--host", "127.0.0.1", "--port", str(self.port)]
        if adapters:
            flags += ["--enable-lora", "--lora-paths"]
            flags += [f"{role}={path}" for role, path in adapters.items()]
        self.flags = flags + (args or [])
        self.own_command = own_command
        self.env = {**os.environ, "HF_HUB_OFFLINE": "1", DIE_WITH_PARENT: "1", **(env or {})}
        self.start_timeout = start_timeout
        self.headers = {"Content-Type": "application/json", **bearer(api_key)}
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by stop
        self._ended_log: str | None = None
        self._process: subprocess.Popen[bytes] | Forked | None = None

    def __enter__(self) -> ServerProcess:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        self._process = self._launch()
        deadline = time.monotonic() + self.start_timeout
        while time.monotonic() < deadline:
            status = self._process.poll()
            if status is not None:
                self.stop()
                raise ServerError(f"The server ended with status {status}:\n{self.log_tail()}")
            try:
                # Answers 200 once the warm-up request is through.
                with _OPENER.open(f"{self.url}/health", timeout=5) as response:
                    if response.status == 200:
                        return
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                pass
            time.sleep(0.2)
        self.stop()
        raise ServerError(f"No server after {self.start_timeout:.0f} s:\n{self.log_tail()}")

    def _launch(self) -> subprocess.Popen[bytes] | Forked:
        # Either way in a session of its own: to stop it is to end SGLang's children, too.
        if self.own_command and (template := template_for(self.env)):
            return template.start(["serve", *self.flags], self._log.fileno())
        module = ["precache_sglang.launch.cli", "serve"]
        if not self.own_command:
            module = ["sglang.launch_server"]
        return subprocess.Popen(
            [sys.executable, "-m", *module, *self.flags],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=self.env,
            start_new_session=True,
        )

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        self._ended_log = self.log()
        self._log.close()

    def terminate(self, timeout: float, signum: int = signal.SIGTERM) -> int:
        """Send a signal to the server's main process; its exit status.

        Raises:
            subprocess.TimeoutExpired: if it still runs after `timeout` seconds.
        """
        assert self._process is not None
        self._process.send_signal(signum)
        return self._process.wait(timeout)

    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def log(self) -> str:
        if self._ended_log is not None:
            return self._ended_log
        end = self._log.seek(0, os.SEEK_END)
        self._log.seek(0)
        return self._log.read(end).decode(errors="replace")

    def log_tail(self, num_lines: int = 40) -> str:
        lines = [line for line in self.log().splitlines() if "server_args=" not in line]
        return "\n".join(line[:400] for line in lines[-num_lines:])

    # -- HTTP ----------------------------------------------------------------

    def get(self, path: str) -> Any:
        return self.call("GET", path)

    def post(self, path: str, body: Mapping[str, Any] | None = None, timeout: float = 600) -> Any:
        return self.call("POST", path, body, timeout)

    def call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        timeout: float = 600,
    ) -> Any:
        """The JSON answer. Raises `ServerError` with status and text otherwise."""
        request = urllib.request.Request(
            self.url + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers=self.headers,
        )
        try:
            with _OPENER.open(request, timeout=timeout) as response:
                text = response.read().decode()
        except urllib.error.HTTPError as error:
            raise ServerError(f"{error.code} {error.read().decode(errors='replace')}") from error
        except (urllib.error.URLError, ConnectionError, TimeoutError) as error:
            raise ServerError(f"{path}: {error}\n{self.log_tail()}") from error
        try:
            return json.loads(text)
        except json.JSONDecodeError:
            return text

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The JSON events of a streamed answer, as they come."""
        request = urllib.request.Request(
            self.url + path,
            method="POST",
            data=json.dumps({**body, "stream": True}).encode(),
            headers=self.headers,
        )
        with _OPENER.open(request, timeout=600) as response:
            for line in response:
                if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                    yield json.loads(line[len(b"data: ") :])

    def has_precache(self) -> bool:
        """Whether the server shares; False on stock SGLang."""
        try:
            self.state()
        except ServerError:
            return False
        return True

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = self.get("/precache/state")
        return state

    def wait_for_backlog(self, timeout: float = 600) -> dict[str, Any]:
        """Wait until no neutral tokens are owed, nothing is provisional; return the state then."""
        deadline = time.monotonic() + timeout
        while (state := self.state())["backlog_tokens"] or state["provisional_tokens"]:
            if time.monotonic() > deadline:
                raise ServerError(f"The backlog did not empty in {timeout:.0f} s: {state}")
            time.sleep(0.005)
        return state


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
