"""What a worker process answers to whoever runs it: ``/livez``, ``/readyz`` and ``/metrics``, on a port of its own.

They are answered by threads, not by the event loop: a loop that hangs is what ``/livez`` is there to tell. The probes
are open, for the nodes of a cluster bring no key, and say a word or two. Metrics name hosts and tell how much runs, so
they want the token, if there is one, and on other addresses than loopback there has to be one.
"""

from __future__ import annotations

import hmac
import http.client
import logging
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any, Self

from prometheus_client import CollectorRegistry, disable_created_metrics, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from producer.addresses import is_loopback
from workers.registry import ConfigurationError

logger = logging.getLogger(__name__)

#: Requests that are answered at one time; more are hung up on.
_MOST_REQUESTS = 16
#: Seconds that a client has to send its request, all of it.
_PATIENCE = 5.0
#: Seconds until another try to take a client for whom the process had no descriptor left.
_ACCEPT_PAUSE = 0.2
#: Seconds that `probe` waits for an answer.
_PROBE_LIMIT = 4.0


@dataclass(frozen=True)
class Health:
    """An answer to a probe: whether all is well, and in a word or two how it is."""

    ok: bool
    words: str


class AdminServer:
    """Serves the three paths while it is entered; port 0 serves nothing, and `port` is then 0.

    ``live()`` and ``ready()`` are asked at each probe, and `collect` adds what ``/metrics`` shows. Raises
    `ConfigurationError` when it may not listen on ``host`` without a ``token``.
    """

    def __init__(
        self, host: str, port: int, token: str | None, *, live: Callable[[], Health], ready: Callable[[], Health]
    ) -> None:
        if port:
            check_exposure(host, token)
        self.port = port
        # A second series for each counter, which nobody asks for.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._host = host
        self._token = token
        self._probes = {"/livez": live, "/readyz": ready}

    def collect(self, *collectors: Collector) -> None:
        """Show these in ``/metrics`` from now on."""
        for collector in collectors:
            self.registry.register(collector)

    def __enter__(self) -> Self:
        if not self.port:
            return self
        try:
            self._server = _Server((self._host, self.port), self._answer)
        except OSError as error:
            # Rollouts matter more: two workers of one host may have been given the same port.
            words = (
                "no probes, no metrics: ROLLOUTS_ADMIN_PORT=%d cannot be listened on (%s); each worker needs its own"
            )
            logger.warning(words, self.port, error.strerror)
            self.port = 0
            return self
        self._thread = threading.Thread(target=self._server.serve_forever, name="admin", daemon=True)
        self._thread.start()
        logger.info("probes and metrics at http://%s:%d: /livez, /readyz, /metrics", self._host, self.port)
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self.port:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()

    def _answer(self, path: str, authorization: str) -> tuple[int, str, bytes]:
        """Return status, content type and body."""
        if probe := self._probes.get(path):
            health = probe()
            return 200 if health.ok else 503, "text/plain; charset=utf-8", f"{health.words}\n".encode()
        if path != "/metrics":
            return 404, "text/plain; charset=utf-8", b"not found\n"
        if self._token and not _is_bearer(authorization, self._token):
            return 401, "text/plain; charset=utf-8", b"a bearer token is wanted\n"
        return 200, CONTENT_TYPE_LATEST, generate_latest(self.registry)


class _Server(ThreadingHTTPServer):
    """A thread for each request, but not for any number of them."""

    daemon_threads = True
    request_queue_size = 128
    block_on_close = False  # a client that sends nothing must not hold up the worker's end

    def __init__(self, address: tuple[str, int], answer: Callable[[str, str], tuple[int, str, bytes]]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.answer = answer
        self._slots = threading.BoundedSemaphore(_MOST_REQUESTS)
        self._asking: dict[socket.socket, float] = {}  # who has not sent all of its request, and since when
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Bind, and ask no name server for the host's name, as `http.server` would: it may not answer."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]

    def get_request(self) -> Any:
        """Take a client; the server would try again at once where that fails, for the client still waits."""
        try:
            return super().get_request()
        except OSError:
            time.sleep(_ACCEPT_PAUSE)
            raise

    def service_actions(self) -> None:
        """Hang up on who takes too long to ask: a limit of each read is none for who sends a byte now and then."""
        now = time.monotonic()
        for connection, since in list(self._asking.items()):
            if now - since > _PATIENCE:
                self.has_asked(connection)
                with suppress(OSError):  # it is closed already
                    connection.shutdown(socket.SHUT_RDWR)

    def has_asked(self, connection: socket.socket) -> None:
        """Note that this client's request is complete, or over."""
        self._asking.pop(connection, None)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread of its own, or hang up when too many are being answered."""
        if not self._slots.acquire(blocking=False):
            self.shutdown_request(request)
            return
        self._asking[request] = time.monotonic()
        try:
            super().process_request(request, client_address)
        except BaseException:
            self.has_asked(request)
            self._slots.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, in that thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.has_asked(request)
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log what went wrong; a client that hung up is nothing."""
        logger.debug("a request to the admin port failed", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    """One request, then the connection is closed."""

    server: _Server
    timeout = _PATIENCE
    server_version = "rollouts"
    sys_version = ""

    def do_GET(self) -> None:
        """Answer; a failure in what is asked is 500, never silence."""
        self.server.has_asked(self.connection)
        try:
            status, content_type, body = self.server.answer(
                self.path.partition("?")[0], self.headers.get("Authorization", "")
            )
        except Exception:
            logger.exception("the admin port could not answer %s", self.path, extra={"stage": "admin"})
            status, content_type, body = 500, "text/plain; charset=utf-8", b"failed; see the worker's log\n"
        self.send_response(status)
        if status == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log no line for each probe."""


def check_exposure(host: str, token: str | None) -> None:
    """Raise `ConfigurationError` when anyone on the network could read the metrics."""
    if not token and not is_loopback(host):
        raise ConfigurationError(
            f"refusing to serve metrics on {host} without a token: set ROLLOUTS_ADMIN_TOKEN (Prometheus sends it as a "
            "bearer token), or ROLLOUTS_ADMIN_HOST=127.0.0.1"
        )


def probe(host: str, port: int, path: str) -> Health:
    """Ask the worker that listens there; that it does not answer is an answer too."""
    target = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - compared, not listened on
    connection = http.client.HTTPConnection(target, port, timeout=_PROBE_LIMIT)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return Health(answer.status == 200, answer.read().decode(errors="replace").strip())
    except (OSError, http.client.HTTPException) as error:
        return Health(False, f"no answer at {target}:{port}: {error}")
    finally:
        connection.close()


def _is_bearer(authorization: str, token: str) -> bool:
    scheme, _, given = authorization.partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), token.encode())
