"""The platform's sandboxes API."""

from __future__ import annotations

from typing import Any

from emulators.prime.commands import job_outcome
from emulators.prime.models import BulkDeleteSandboxes, CreateSandbox, JobKeys, SandboxIds
from emulators.prime.refusals import AnswerError, Query, parse
from emulators.prime.sandboxes import ACTIVE, Sandbox, Sandboxes, describe, far_ahead
from emulators.prime.web import Answer, Request, json_answer


class SandboxApi:
    """Handlers of ``/api/v1/sandbox``; each takes the request and, for one sandbox, its id."""

    def __init__(self, sandboxes: Sandboxes, gateway_url: str, user_ns: str, *, gateway_auth: bool) -> None:
        self._sandboxes = sandboxes
        self._gateway_url = gateway_url
        self._user_ns = user_ns
        self._gateway_auth = gateway_auth

    def create(self, request: Request) -> Answer:
        sandbox = self._sandboxes.create(parse(CreateSandbox, request))
        record = describe(sandbox)
        if self._gateway_auth:
            record["gatewayAuth"] = self._auth(sandbox)
        return json_answer(record)

    def statuses(self, request: Request, failing: dict[str, str]) -> Answer:
        """Answer a batch; ``failing`` gives the error code of the sandboxes that a fault is meant for."""
        found: list[dict[str, Any]] = []
        errors: list[dict[str, Any]] = []
        for sandbox_id in parse(SandboxIds, request).sandbox_ids:
            sandbox = self._sandboxes.all.get(sandbox_id)
            code = failing.get(sandbox_id) or ("NOT_FOUND" if sandbox is None or sandbox.deleted else None)
            if sandbox is None or code:
                errors.append({"sandbox_id": sandbox_id, "code": code, "message": f"Sandbox {sandbox_id}: {code}"})
            else:
                found.append(
                    {
                        "sandbox_id": sandbox_id,
                        "status": sandbox.status,
                        "error_type": sandbox.error_type,
                        "error_message": sandbox.error_message,
                        "pending_image_build_id": sandbox.pending_image_build_id,
                    }
                )
        return json_answer({"statuses": found, "errors": errors})

    def job_statuses(self, request: Request, failing: dict[str, str]) -> Answer:
        found: list[dict[str, Any]] = []
        errors: list[dict[str, Any]] = []
        for job in parse(JobKeys, request).jobs:
            key = {"sandbox_id": job.sandbox_id, "job_id": job.job_id}
            outcome = failing.get(job.sandbox_id) or self._outcome(job.sandbox_id, job.job_id)
            if isinstance(outcome, int):
                found.append({**key, "completed": True, "exit_code": outcome})
            elif outcome == "running":
                found.append({**key, "completed": False, "exit_code": None})
            else:
                errors.append({**key, "code": outcome, "message": f"Job {job.job_id}: {outcome}"})
        return json_answer({"statuses": found, "errors": errors})

    def _outcome(self, sandbox_id: str, job_id: str) -> int | str:
        """Return the exit code, "running", or an error code."""
        sandbox = self._sandboxes.all.get(sandbox_id)
        if sandbox is None or sandbox.deleted:
            return "NOT_FOUND"
        if sandbox.status != "RUNNING":
            return "NOT_RUNNING"
        outcome = job_outcome(sandbox, job_id)
        return {None: "NOT_FOUND", "lost": "RUNTIME_ERROR"}.get(outcome, outcome)  # type: ignore[arg-type, return-value]

    def get(self, _: Request, sandbox_id: str) -> Answer:
        return json_answer(describe(self._one(sandbox_id)))

    def list(self, request: Request) -> Answer:
        query = Query(request, "page", "per_page", "labels", "status", "is_active", "team_id", "user_id")
        page, size = query.number("page", 1, 1_000_000), query.number("per_page", 50, 100)
        labels, status, team = set(query.many("labels")), query.one("status"), query.one("team_id")
        active = query.flag("is_active")
        chosen = [
            sandbox
            for sandbox in reversed(self._sandboxes.all.values())
            if labels <= set(sandbox.request.labels)
            and (status is None or sandbox.status == status)
            and (team is None or sandbox.request.team_id == team)
            and (not active or sandbox.status in ACTIVE)
        ]
        begin = (page - 1) * size
        return json_answer(
            {
                "sandboxes": [describe(sandbox) for sandbox in chosen[begin : begin + size]],
                "total": len(chosen),
                "page": page,
                "perPage": size,
                "hasNext": begin + size < len(chosen),
            }
        )

    def delete(self, _: Request, sandbox_id: str) -> Answer:
        self._sandboxes.delete(self._one(sandbox_id))
        return json_answer({"id": sandbox_id, "message": "Sandbox deleted"})

    def bulk_delete(self, request: Request) -> Answer:
        body = parse(BulkDeleteSandboxes, request)
        succeeded, failed = [], []
        ids = body.sandbox_ids if body.sandbox_ids is not None else list(self._sandboxes.all)
        for sandbox_id in ids:
            sandbox = self._sandboxes.all.get(sandbox_id)
            if sandbox is None or sandbox.deleted:
                if body.sandbox_ids is not None:
                    failed.append({"sandbox_id": sandbox_id, "error": "Sandbox not found"})
                continue
            # A sandbox that has all of the labels, as when listing.
            wanted = set(body.labels or []) <= set(sandbox.request.labels)
            if wanted and (body.team_id is None or sandbox.request.team_id == body.team_id):
                self._sandboxes.delete(sandbox)
                succeeded.append(sandbox_id)
        message = f"{len(succeeded)} sandboxes deleted, {len(failed)} failed"
        return json_answer({"succeeded": succeeded, "failed": failed, "message": message})

    def auth(self, _: Request, sandbox_id: str) -> Answer:
        return json_answer(self._auth(self._one(sandbox_id)))

    def error_context(self, _: Request, sandbox_id: str) -> Answer:
        sandbox = self._one(sandbox_id)
        return json_answer(
            {"status": sandbox.status, "errorType": sandbox.error_type, "errorMessage": sandbox.error_message}
        )

    def _auth(self, sandbox: Sandbox) -> dict[str, str]:
        return {
            "gateway_url": self._gateway_url,
            "user_ns": self._user_ns,
            "job_id": sandbox.job_name,
            "token": self._sandboxes.mint_token(sandbox),
            "expires_at": far_ahead(),
        }

    def _one(self, sandbox_id: str) -> Sandbox:
        sandbox = self._sandboxes.all.get(sandbox_id)
        if sandbox is None or sandbox.deleted:
            raise AnswerError(404, f"Sandbox {sandbox_id} not found")
        return sandbox
