"""Servers forked from a process that has SGLang imported already.

Importing SGLang is two thirds of what a server takes to start on a CPU, and whoever compares
methods starts many. A `Template` is that process, one for each environment; it forks a server
for every call of `Template.start`, which runs the very function behind ``precache-sglang serve``.

Where there is an accelerator nothing is forked: its context does not survive that.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping

_MAX_TEMPLATES = 3  # 1.2 GiB each, half of it files that all processes map
_lock = threading.Lock()
_templates: dict[frozenset[tuple[str, str]], Template | None] = {}  # the latest used last


def template_for(env: Mapping[str, str]) -> Template | None:
    """This process's template with the environment `env`; None where servers are not forked."""
    key = frozenset(env.items())
    with _lock:
        is_known = key in _templates
        template = _templates.pop(key, None)
        if not is_known or (template is not None and template.has_ended()):
            _make_room()
            template = Template.of(env)
        _templates[key] = template
    return template


def _make_room() -> None:
    idle = [key for key, template in _templates.items() if template and not template.is_in_use()]
    for key in idle[: max(0, len(_templates) + 1 - _MAX_TEMPLATES)]:
        template = _templates.pop(key)
        assert template is not None
        template.end()


class Forked:
    """A forked server: what `subprocess.Popen` has, as far as `ServerProcess` needs it."""

    def __init__(self, pid: int, status: int) -> None:
        self.pid = pid
        self._status = status  # a pipe; brings the exit status, and ends
        self._returncode: int | None = None

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self._returncode

    def wait(self, timeout: float | None = None) -> int:
        if self._returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("precache-sglang serve", timeout or 0)
            said = os.read(self._status, 16)
            os.close(self._status)
            self._returncode = int(said) if said else -signal.SIGKILL
        return self._returncode

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)


class Template:
    """See the module's docstring. Ends, with all its servers, when this process does."""

    def __init__(self, process: subprocess.Popen[bytes], channel: socket.socket) -> None:
        self._process = process
        self._channel = channel
        self._lock = threading.Lock()
        self._servers: list[Forked] = []

    @classmethod
    def of(cls, env: Mapping[str, str]) -> Template | None:
        """Start one; None if it says that nothing can be forked here, or does not come up."""
        channel, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(its.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # what is wrong, an ordinary start says as well
                env=dict(env),
                pass_fds=[its.fileno()],
                start_new_session=True,
            )
        if channel.recv(16) == b"ready":
            return cls(process, channel)
        channel.close()
        process.wait()
        return None

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def is_in_use(self) -> bool:
        """Whether a server of its runs."""
        with self._lock:
            self._servers = [server for server in self._servers if server.poll() is None]
        return bool(self._servers)

    def end(self) -> None:
        """End it, and whatever servers it has."""
        self._channel.close()
        self._process.wait()

    def start(self, argv: list[str], log: int) -> Forked:
        """Fork ``precache-sglang ARGV``; its output goes to the file descriptor `log`."""
        status, its = os.pipe()
        try:
            request = json.dumps({"argv": argv, "cwd": os.getcwd()}).encode()
            with self._lock:
                socket.send_fds(self._channel, [request], [log, its])
                server = Forked(int(self._channel.recv(16)), status)
                self._servers.append(server)
        finally:
            os.close(its)
        return server


def _run(channel: socket.socket) -> list[str] | None:
    """Fork what is asked for: the arguments, in the child; None, in here, at the end.

    A keeper stands between: it waits for the server, and goes down with the template. The server
    goes down with the keeper, since `ServerProcess` asks for that in its environment.
    """
    from sglang.srt.utils import kill_itself_when_parent_died

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the keepers
    while True:
        said, fds, _, _ = socket.recv_fds(channel, 1 << 20, 2)
        if not said:
            return None
        request = json.loads(said)
        if os.fork():
            for fd in fds:
                os.close(fd)
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        kill_itself_when_parent_died()
        log, status = fds
        pid = os.fork()
        if pid:
            channel.close()
            os.close(log)
            _keep(pid, status)
        os.close(status)
        os.setsid()
        channel.send(str(os.getpid()).encode())  # from here on its group can be ended
        channel.close()
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        os.chdir(request["cwd"])
        random.seed()
        arguments: list[str] = request["argv"]
        return arguments


def _keep(pid: int, status: int) -> None:
    """Wait for the server, and say how it ended."""
    _, ended = os.waitpid(pid, 0)
    os.write(status, str(os.waitstatus_to_exitcode(ended)).encode())
    os._exit(0)


def main() -> None:
    channel = socket.socket(fileno=int(sys.argv[1]))
    from sglang.srt.plugins import load_plugins

    load_plugins()  # before the modules that hooks go into, as `serve` does
    import sglang.srt.entrypoints.http_server

    from precache_sglang.platform import is_active

    if not is_active():
        return
    import sglang.srt.managers.scheduler
    import sglang.srt.models.registry  # noqa: F401 - every model's module
    from precache_sglang.launch.cli import main as command

    channel.send(b"ready")
    argv = _run(channel)
    if argv is not None:
        sys.argv = ["precache-sglang", *argv]
        command(argv)


if __name__ == "__main__":
    main()
