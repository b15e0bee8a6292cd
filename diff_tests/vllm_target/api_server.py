"""vLLM's OpenAI-compatible server on 127.0.0.1, in processes of its own, with our plugin in each of them."""

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
from pathlib import Path
from types import TracebackType
from typing import Any

from diff_tests.vllm_target.processes import environment
from diff_tests.vllm_target.releases import Source, TargetStartError

_START_TIMEOUT_S = 300.0
_END_TIMEOUT_S = 15.0
_PLUGIN = "kvoracle_engine = diff_tests.vllm_target.engine.plugin:register"
CONNECTOR_VARIABLE = "KVORACLE_CONNECTOR"
"""Environment variable with the path of a connector file that replaces the installed one."""


class ApiServer:
    """A running server, as a context. settings: engine arguments by name. folder: for what it needs on disk. connector:
    a connector file that replaces the installed one. Raises TargetStartError if it does not come up."""

    def __init__(self, source: Source, settings: dict[str, Any], folder: Path, connector: str | None = None) -> None:
        self.port = _free_port()
        self._model = settings["model"]
        self._output = tempfile.TemporaryFile("a+b")  # noqa: SIM115 - lives as long as the server
        command = [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1"]
        self._process = subprocess.Popen(
            [*command, "--port", str(self.port), *arguments(settings)],
            env=_server_environment(source, folder, connector),
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C in a terminal reaches us; its children end with its group
        )

    def __enter__(self) -> ApiServer:
        try:
            self._wait_until_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise TargetStartError(f"the server ended while it started: {self.last_lines(8)}")
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=2):
                return
            time.sleep(0.2)
        raise TargetStartError(f"the server did not come up in {_START_TIMEOUT_S:g} seconds: {self.last_lines(5)}")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def complete(self, body: dict[str, Any], timeout_s: float, on_token: Any = None) -> None:
        """One streamed completion, to its end; on_token is called at each piece. Raises OSError where it fails."""
        data = json.dumps({"model": self._model, "stream": True, **body}).encode()
        request = urllib.request.Request(f"{self.url}/v1/completions", data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                for line in response:
                    if on_token is not None and line.startswith(b"data:"):
                        on_token()
        except urllib.error.HTTPError as error:
            raise OSError(f"HTTP {error.code}: {error.read().decode(errors='replace')[:300]}") from None

    def last_lines(self, count: int) -> str:
        """The end of what the server printed."""
        fd = self._output.fileno()
        tail = os.pread(fd, 16384, max(os.fstat(fd).st_size - 16384, 0))
        lines = [line for line in tail.decode(errors="replace").splitlines() if line.strip()]
        return "\n".join(lines[-count:])

    def close(self) -> None:
        """Ends the server and what it has started."""
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=_END_TIMEOUT_S)
        self.kill()
        self._process.wait()
        self._output.close()

    def kill(self) -> None:
        """Ends the server and what it has started at once, in the middle of whatever it does."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


def arguments(settings: dict[str, Any]) -> list[str]:
    """Engine arguments as options of the server's command line."""
    options: list[str] = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            options.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            options += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return options


def _server_environment(source: Source, folder: Path, connector: str | None) -> dict[str, str]:
    """The environment of our other vLLM processes, with our plugin where vLLM finds it."""
    variables = environment(source)
    return {
        **variables,
        **ENGINE_ENVIRONMENT,
        "PYTHONPATH": os.pathsep.join([variables["PYTHONPATH"], str(plugin_folder(folder))]),
        "TORCHDYNAMO_DISABLE": "1",
        **({CONNECTOR_VARIABLE: connector} if connector else {}),
    }


def plugin_folder(folder: Path) -> Path:
    """A new folder below, with nothing in it but an entry point: in whose module path it is, that vLLM loads our plugin."""
    about = folder / "plugin" / "kvoracle_engine-0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: kvoracle-engine\nVersion: 0\n")
    (about / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{_PLUGIN}\n")
    return about.parent


ENGINE_ENVIRONMENT = {
    "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
"""For every engine of `e2e`: request IDs as we give them, a bounded cache, and no processor of its own."""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
