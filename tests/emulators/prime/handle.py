"""The tests' handle on the emulator: starts the server process, controls it, and stops it with all that it started."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

#: Version file of the frpc binary that prime-tunnel 0.1.15 looks for (`prime_tunnel.binary.FRPC_VERSION`).
FRPC_VERSION = "0.66.0"
#: Seconds that a call, the start, or the end of the server may take.
CALL_LIMIT = 60.0
READ_LIMIT = 10 * 1024 * 1024

_TESTS = Path(__file__).resolve().parents[2]


class PrimeEmulator:
    """A Prime platform on loopback, for as long as the ``with`` block lasts.

    ``minute_seconds`` is how long a minute of a sandbox's lifetime takes, ``start_seconds`` how long a sandbox stays
    PENDING. ``gateway_auth=False`` leaves the gateway token out of the answer to a creation, so that the SDK has to ask
    for it. Reads of a part of a file are ignored, as for the platform's VM sandboxes, unless ``windowed_reads``; a file
    above ``read_limit`` bytes cannot be read (413). ``kept`` names folders of the host that commands may use although
    they lie in a folder that each sandbox has of its own (`emulators.prime.paths.FOLDERS`), such as a test's tmp_path.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        minute_seconds: float = 60.0,
        start_seconds: float = 0.0,
        gateway_auth: bool = True,
        windowed_reads: bool = False,
        read_limit: int = READ_LIMIT,
        kept: Sequence[str | Path] = (),
    ) -> None:
        self.directory = Path(directory).absolute()
        self.api_key = f"pit_{secrets.token_hex(16)}"
        self.home = self.directory / "home"
        self.api_url = ""
        self._options = {
            "directory": str(self.directory),
            "api_key": self.api_key,
            "minute_seconds": minute_seconds,
            "start_seconds": start_seconds,
            "gateway_auth": gateway_auth,
            "windowed_reads": windowed_reads,
            "read_limit": read_limit,
            "kept": [str(path) for path in kept],
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._buffer = b""
        self._lock = threading.Lock()

    # Its life.

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start the server and wait until it serves."""
        self._install_frpc()
        # The server notices the end of this process, however it comes, by the end of this channel.
        self._channel, theirs = socket.socketpair()
        self._channel.settimeout(CALL_LIMIT)
        options = json.dumps({**self._options, "channel": theirs.fileno()})
        path = os.pathsep.join([str(_TESTS), str(_TESTS.parent), os.environ.get("PYTHONPATH", "")])
        with theirs, open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "emulators.prime", options],
                env={**os.environ, "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        try:
            self.api_url = self._receive()["api_url"]
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop the server, all sandboxes and every frpc, and remove their folders; may be called again."""
        if self._channel:
            with suppress(OSError):
                self._channel.shutdown(socket.SHUT_RDWR)  # a forked child may hold it open
            self._channel.close()
            self._channel = None
        if self._process:
            try:
                self._process.wait(CALL_LIMIT)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None

    def _install_frpc(self) -> None:
        folder = self.home / ".prime" / "bin"
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / "frpc"
        source = Path(__file__).with_name("frpc.py").read_text().replace("@EMULATOR@", str(target))
        target.write_text(f"#!{sys.executable} -SE\n{source}")
        target.chmod(0o755)
        (folder / ".frpc_version").write_text(FRPC_VERSION)

    # What a worker process needs.

    @property
    def environ(self) -> dict[str, str]:
        return {"PRIME_API_KEY": self.api_key, "PRIME_API_BASE_URL": self.api_url, "HOME": str(self.home)}

    @property
    def log(self) -> Path:
        """The server's log; there is nothing in it unless something went wrong."""
        return self.directory / "emulator.log"

    # What goes wrong.

    def fault(
        self,
        endpoint: str,
        *,
        status: int | None = None,
        detail: Any = None,
        retry_after: float | None = None,
        delay: float | None = None,
        hang: bool | Literal["after"] = False,
        drop: Literal["before", "after"] | None = None,
        code: str | None = None,
        times: int | None = 1,
        skip: int = 0,
        sandbox_id: str | None = None,
    ) -> None:
        """Let the next matching requests go wrong, ``times=None`` for ever; see `emulators.prime.faults.Fault`."""
        self._call(
            "fault",
            endpoint=endpoint,
            status=status,
            detail=detail,
            retry_after=retry_after,
            delay=delay,
            hang=hang,
            drop=drop,
            code=code,
            times=times,
            skip=skip,
            sandbox_id=sandbox_id,
        )

    def clear_faults(self) -> None:
        """Let nothing go wrong any more; what a fault holds back is answered."""
        self._call("clear_faults")

    def image(
        self, name: str, *, pull_fails: bool = False, build_seconds: float = 0.0, oom_at_start: bool = False
    ) -> None:
        """Say how sandboxes of an image fare; its first sandbox starts the build, the others wait for its end."""
        self._call("image", name=name, pull_fails=pull_fails, build_seconds=build_seconds, oom_at_start=oom_at_start)

    def end_sandbox(
        self,
        sandbox_id: str | None = None,
        status: str = "ERROR",
        error_type: str | None = "OOM_KILLED",
        message: str | None = "The sandbox ran out of memory",
    ) -> None:
        """Let one sandbox die, or all that are alive, with its processes."""
        self._call("end_sandbox", sandbox_id=sandbox_id, status=status, error_type=error_type, message=message)

    def expire_tokens(self, sandbox_id: str | None = None) -> None:
        """Make the gateway refuse the tokens handed out so far (401); a new one can be had."""
        self._call("expire_tokens", sandbox_id=sandbox_id)

    def kill_frpc(self, tunnel_id: str | None = None) -> list[int]:
        """SIGKILL the frpc of one tunnel, or of all; returns the process ids. Its URL is dead when this returns."""
        return self._call("kill_frpc", tunnel_id=tunnel_id)

    def delete_tunnel(
        self, tunnel_id: str | None = None, *, status: Literal["expired", "terminated"] | None = None
    ) -> None:
        """End a registration as the platform may do: frpc lives, is rejected, and says "tunnel not registered".

        With ``status`` the record stays and says so, and frpc hears "tunnel is inactive".
        """
        self._call("delete_tunnel", tunnel_id=tunnel_id, status=status)

    def cut_tunnel(self, tunnel_id: str | None = None) -> None:
        """Break the control connection once; the living frpc connects again by itself, a moment later."""
        self._call("cut_tunnel", tunnel_id=tunnel_id)

    def disconnect_tunnel(self, tunnel_id: str | None = None) -> None:
        """Stop serving a URL whose frpc lives, and believes itself connected, until frpc is started again."""
        self._call("disconnect_tunnel", tunnel_id=tunnel_id)

    def limit_tunnels(self, n: int | None) -> None:
        """Refuse a registration when there are ``n`` live ones already; None: no limit."""
        self._call("limit_tunnels", count=n)

    # What has happened.

    def requests(self) -> dict[str, int]:
        """Return how many requests each endpoint has had, those that failed included."""
        return self._call("requests")

    def refused(self) -> list[tuple[str, str]]:
        """Return the requests that no correct client sends, as (endpoint, why)."""
        return [(endpoint, why) for endpoint, why in self._call("refused")]

    def sandboxes(self) -> list[dict[str, Any]]:
        """Return every sandbox ever created; ``processes`` are those that commands and jobs have started directly."""
        return self._call("sandboxes")

    def tunnels(self) -> list[dict[str, Any]]:
        """Return every tunnel ever registered."""
        return self._call("tunnels")

    def leaked(self) -> dict[str, list[Any]]:
        """Return what is left: sandboxes and tunnels that nobody deleted, and living processes of ended sandboxes.

        What has ended by itself (a sandbox's lifetime, a tunnel that the platform deleted) is not left over; a sandbox
        that failed is.
        """
        return self._call("leaked")

    def _call(self, call: str, /, **arguments: Any) -> Any:
        with self._lock:
            if self._channel is None:
                raise RuntimeError("the emulator is not running")
            with suppress(BrokenPipeError):  # its end is told below
                self._channel.sendall(json.dumps({"name": call, "arguments": arguments}).encode() + b"\n")
            return self._receive()

    def _receive(self) -> Any:
        while b"\n" not in self._buffer:
            received = b""
            with suppress(ConnectionResetError):
                received = self._channel.recv(1 << 20) if self._channel else b""
            if not received:
                raise RuntimeError(f"the emulator has ended; its log ends:\n{self.log.read_text()[-2000:]}")
            self._buffer += received
        line, _, self._buffer = self._buffer.partition(b"\n")
        message = json.loads(line)
        if "error" in message:
            raise RuntimeError(message["error"])
        return message["result"]
