"""The OpenAPI document: every route is in it, and fuzzing by it finds no fault and no answer that it does not name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

EXAMPLES = 8


def test_every_route_is_in_the_document(gateway: Any, shared: Any) -> None:
    app = shared[2].app
    base = "/v1/rollouts/{rollout_id}"
    routes = {f"{base}/{path}" for path in [*app._calls, *app._sides, *app._control, "models"]}
    assert set(gateway.get("/openapi.json").json()["paths"]) == routes | set(app._own) - {"/openapi.json"}


def test_fuzzing_finds_no_fault_and_no_answer_that_is_not_in_the_document(
    gateway_with: Callable[..., Any], model: Any, model_url: str
) -> None:
    schemathesis = pytest.importorskip("schemathesis")
    from schemathesis.specs.openapi import checks as names

    gateway = gateway_with(upstream=model_url, control_key="control-key", pause_limit=0.01)
    control = {"authorization": "Bearer control-key"}
    keys = {"control": control, "agent": {"authorization": "Bearer agent-key"}}
    checks = [names.status_code_conformance, names.content_type_conformance, names.response_schema_conformance]
    document = gateway.get("/openapi.json").json()
    schema = schemathesis.openapi.from_dict(document)
    quick = settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    seen = set()

    def fuzz(operation: Any) -> None:
        security = operation.definition.raw.get("security") or [{"": []}]
        headers = keys.get(next(iter(security[0])), {})

        @quick
        @given(case=operation.as_strategy())
        def run(case: Any) -> None:
            if case.path_parameters:
                case.path_parameters["rollout_id"] = "fuzzed"  # any other is a 404 before anything is read
            answer = case.call(base_url=str(gateway.base_url), headers=headers, timeout=20)
            assert answer.status_code < 500 or answer.status_code in {502, 503, 504}, (case, answer.text)
            assert answer.status_code != 401
            case.validate_response(answer, checks=checks)
            seen.add((operation.path, operation.method))

        run()

    for result in schema.get_all_operations():
        gateway.post("/admin/resume", headers=control)
        gateway.post(
            "/v1/rollouts/fuzzed/register",
            json={"model": "m"},
            headers=control | {"x-rollout-key": "agent-key"},
        )
        fuzz(result.ok())
    assert len(seen) == len(document["paths"])
