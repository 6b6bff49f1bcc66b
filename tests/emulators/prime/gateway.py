"""One sandbox's gateway: Connect RPC commands, uploads, downloads and file reads, behind the sandbox's own token."""

from __future__ import annotations

import pwd
from collections.abc import Awaitable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from emulators.prime import commands, connect
from emulators.prime.refusals import AnswerError, RefusalError
from emulators.prime.sandboxes import Sandbox, Sandboxes
from emulators.prime.web import Answer, Outcome, Request, json_answer

START = "command_session.CommandSession/Start"
ENDPOINTS = {
    ("POST", START): "command",
    ("POST", "upload"): "upload",
    ("GET", "download"): "download",
    ("GET", "read-file"): "read_file",
}


class Gateway:
    """Answers under ``{gateway_url}/{user_ns}/{job_id}/``."""

    def __init__(self, sandboxes: Sandboxes, user_ns: str, read_limit: int, *, windowed_reads: bool) -> None:
        self._sandboxes = sandboxes
        self._user_ns = user_ns
        self._read_limit = read_limit
        self._windowed_reads = windowed_reads

    def sandbox_of(self, job_name: str) -> Sandbox | None:
        return self._sandboxes.by_job_name.get(job_name)

    def handle(self, endpoint: str, request: Request, user_ns: str, job_name: str) -> Outcome | Awaitable[Outcome]:
        rpc = endpoint == "command"
        sandbox = self.sandbox_of(job_name)
        owner = self._sandboxes.by_token.get(request.bearer or "")
        if owner is None or user_ns != self._user_ns or (sandbox is not None and owner is not sandbox):
            why = "missing" if request.bearer is None else "another sandbox's" if owner else "unknown or expired"
            body = {"code": "unauthenticated", "message": f"the sandbox token is {why}", "detail": "Unauthorized"}
            raise RefusalError(401, f"sandbox token {why}", body)
        _require_running(sandbox, rpc=rpc)
        assert sandbox is not None
        if rpc:
            return self._command(sandbox, request)
        sandbox.prepare()
        if endpoint != "read_file":
            _require_own_id(sandbox, request)
        return {"upload": self._upload, "download": self._download, "read_file": self._read}[endpoint](sandbox, request)

    def _command(self, sandbox: Sandbox, request: Request) -> Outcome | Awaitable[Outcome]:
        if request.headers.get("content-type") != connect.CONTENT_TYPE:
            raise RefusalError(415, f"content type {request.headers.get('content-type')!r}")
        try:
            start = connect.decode_start(request.body)
            timeout = (
                int(request.headers["connect-timeout-ms"]) / 1000 if "connect-timeout-ms" in request.headers else None
            )
        except ValueError as error:
            raise RefusalError(400, str(error), {"code": "invalid_argument", "message": str(error)}) from error
        if start.stdin:
            raise RefusalError(501, "live processes", {"code": "unimplemented", "message": "stdin is not emulated"})
        spec = start.command
        if spec.cmd != "/bin/bash" or len(spec.args) != 2 or spec.args[0] != "-c":
            # Any program could be run; this SDK always asks for bash, so another request is a mistake of ours.
            why = f"not a bash -c command: {spec.cmd} {list(spec.args)}"
            raise RefusalError(400, why, {"code": "invalid_argument", "message": why})
        if spec.HasField("user"):
            _require_user(spec.user)
        cwd = spec.cwd if spec.HasField("cwd") else "/"
        command = spec.args[1]
        frames = commands.native(sandbox, command, cwd) if not spec.envs else None
        if frames is not None:
            return Answer(200, frames, connect.CONTENT_TYPE)
        sandbox.prepare()
        folder = sandbox.paths.locate(cwd)
        if not folder.is_dir():
            message = f"cwd '{cwd}' does not exist"
            return Answer(200, connect.failure("invalid_argument", message), connect.CONTENT_TYPE)
        return commands.Command(sandbox, request.connection).run(command, spec.envs.items(), folder, timeout)

    def _upload(self, sandbox: Sandbox, request: Request) -> Answer:
        path = _path(request)
        content = _file_part(request)
        target = sandbox.paths.own(path)
        if target.is_dir():
            raise AnswerError(400, f"{path} is a directory")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(sandbox.paths.enter_bytes(content))
        now = datetime.now(UTC).isoformat()
        return json_answer({"success": True, "path": path, "size": len(content), "timestamp": now})

    def _download(self, sandbox: Sandbox, request: Request) -> Answer:
        content = sandbox.paths.leave(_read_file(sandbox, _path(request)))
        return Answer(200, content, "application/octet-stream")

    def _read(self, sandbox: Sandbox, request: Request) -> Answer:
        path, query = _path(request), request.query
        unknown = set(query) - {"path", "offset", "length"}
        if unknown:
            raise RefusalError(422, f"unknown parameters {sorted(unknown)}")
        content = sandbox.paths.leave(_read_file(sandbox, path))
        window: dict[str, object] = {}
        if self._windowed_reads and ("offset" in query or "length" in query):
            content, window = _cut_window(content, int(query.get("offset", ["0"])[0]), query.get("length"))
        if len(content) > self._read_limit:
            raise AnswerError(413, f"{path} has {len(content)} bytes; at most {self._read_limit} can be read")
        text = content.decode(errors="replace")
        return json_answer({"content": text, "size": len(content), **window})


def _require_running(sandbox: Sandbox | None, *, rpc: bool) -> None:
    """Raise what the gateway answers for a sandbox that does not run: commands and files have their own words."""
    if sandbox is None or sandbox.deleted:
        body = {"code": "not_found", "message": "sandbox not found"} if rpc else {"error": "sandbox_terminated"}
        raise AnswerError(404 if rpc else 410, "the sandbox was deleted", body)
    if sandbox.status == "PENDING":
        raise AnswerError(503, "the sandbox has not started", {"code": "unavailable", "message": "sandbox not ready"})
    if sandbox.status != "RUNNING":
        body = {"code": "not_found", "message": "sandbox not running"} if rpc else {"error": "sandbox_not_running"}
        raise AnswerError(404 if rpc else 409, "the sandbox is not running", body)


def _require_own_id(sandbox: Sandbox, request: Request) -> None:
    given = request.query.get("sandbox_id", [""])[0]
    if given != sandbox.id:
        raise RefusalError(422, f"sandbox_id is {given!r}, the token is for {sandbox.id}")


def _require_user(name: str) -> None:
    with suppress(KeyError):
        pwd.getpwnam(name)
        return
    message = f"user {name!r} does not exist"
    raise AnswerError(400, message, {"code": "invalid_argument", "message": message})


def _path(request: Request) -> str:
    path = request.query.get("path", [""])[0]
    if not path or "\0" in path:
        raise RefusalError(422, "the parameter path is missing or not a path")
    return path


def _read_file(sandbox: Sandbox, path: str) -> bytes:
    target = sandbox.paths.locate(path)
    if not target.exists() and Path(path).is_absolute() and not sandbox.paths.owns(path):
        target = Path(path)  # a file of the image, which here is the host: /etc/os-release and the like
    try:
        return target.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise AnswerError(404, f"File not found: {path}") from error
    except OSError as error:
        raise AnswerError(400, f"cannot read {path}: {error.strerror}") from error


def _cut_window(content: bytes, offset: int, length: list[str] | None) -> tuple[bytes, dict[str, object]]:
    """Cut as the platform does where it supports windows; a negative offset counts from the end."""
    begin = max(0, len(content) + offset) if offset < 0 else min(offset, len(content))
    end = min(len(content), begin + int(length[0])) if length else len(content)
    truncated = end - begin < len(content)
    return content[begin:end], {"total_size": len(content), "offset": begin, "truncated": truncated}


def _file_part(request: Request) -> bytes:
    """Return the content of the only part, ``file``, of a multipart body."""
    kind, _, rest = request.headers.get("content-type", "").partition(";")
    boundary = rest.partition("boundary=")[2].strip().strip('"')
    if kind.strip() != "multipart/form-data" or not boundary:
        raise RefusalError(422, f"an upload is multipart/form-data, not {kind!r}")
    delimiter = b"--" + boundary.encode()
    body = request.body.removesuffix(b"\r\n")
    if not (body.startswith(delimiter + b"\r\n") and body.endswith(b"\r\n" + delimiter + b"--")):
        raise RefusalError(422, "the multipart body is malformed")
    part = body[len(delimiter) + 2 : -len(delimiter) - 4]
    head, separator, content = part.partition(b"\r\n\r\n")
    if not separator or b'name="file"' not in head or b"\r\n" + delimiter in content:
        raise RefusalError(422, "an upload has exactly one part, named file")
    return content
