"""What the emulator refuses because the platform refuses it; the SDK could not send most of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import httpx
import pytest
from prime_sandboxes._proto.command_session.command_session_pb2 import StartRequest

from emulators.prime import PrimeEmulator


class TestStrictness:
    BODY: ClassVar = {"name": "n", "docker_image": "i", "vm": True, "idempotency_key": "k"}

    @pytest.fixture
    def api(self, emulator: PrimeEmulator) -> Iterator[httpx.Client]:
        base, headers = f"{emulator.api_url}/api/v1", {"Authorization": f"Bearer {emulator.api_key}"}
        with httpx.Client(base_url=base, headers=headers) as client:
            self.emulator, self.known = emulator, len(emulator.refused())
            yield client

    def refusals(self) -> list[str]:
        return [endpoint for endpoint, _ in self.emulator.refused()[self.known :]]

    @pytest.mark.parametrize(
        "change",
        [
            {"gpus": 1},
            {"lan_network_id": "x"},
            {"name": ""},
            {"name": None},
            {"docker_image": None},
            {"gpu_count": 1},
            {"gpu_type": "H100"},
            {"timeout_minutes": 0},
            {"timeout_minutes": 1441},
            {"timeout_minutes": "60"},
            {"vm": False},
            {"environment_vars": {"A B": "1"}},
            {"environment_vars": {"A": 1}},
            {"labels": "x"},
            {"cpu_cores": 0},
            {"idle_timeout_minutes": 61},
            {"network_allowlist": [], "network_denylist": []},
        ],
        ids=str,
    )
    def test_a_wrong_creation_is_refused(self, api: httpx.Client, change: dict[str, Any]) -> None:
        answer = api.post("/sandbox", json={**self.BODY, **change})
        assert answer.status_code == 422
        assert answer.json()["detail"][0]["loc"][0] == "body"
        assert self.refusals() == ["create_sandbox"]

    def test_a_missing_field_is_refused(self, api: httpx.Client) -> None:
        assert api.post("/sandbox", json={"docker_image": "i"}).status_code == 422
        assert api.post("/tunnel", json={"name": "n"}).status_code == 422
        assert api.post("/tunnel", json={"local_port": 1, "port": 1}).status_code == 422
        assert api.post("/sandbox", content=b"{").status_code == 422
        assert self.refusals() == ["create_sandbox", "create_tunnel", "create_tunnel", "create_sandbox"]

    def test_more_than_a_hundred_ids_are_refused(self, api: httpx.Client) -> None:
        ids = [f"sb{i}" for i in range(101)]
        jobs = [{"sandbox_id": sandbox_id, "job_id": "0" * 8} for sandbox_id in ids]
        for path, name, values in (
            ("/sandbox/status:batchGet", "sandbox_ids", ids),
            ("/sandbox/background-jobs/status:batchGet", "jobs", jobs),
        ):
            for wrong in (values, [], [values[0], values[0]]):
                assert api.post(path, json={name: wrong}).status_code == 422
            assert len(api.post(path, json={name: values[:100]}).json()["errors"]) == 100
        assert api.request("DELETE", "/sandbox", json={"sandbox_ids": ids}).status_code == 422
        assert api.request("DELETE", "/sandbox", json={"all_users": False}).status_code == 422
        assert self.refusals() == ["sandbox_statuses"] * 3 + ["job_statuses"] * 3 + ["bulk_delete_sandboxes"] * 2

    def test_missing_and_wrong_keys_are_refused(self, api: httpx.Client) -> None:
        paths = ["/sandbox", "/sandbox/x", "/tunnel", "/tunnel/x", "/sandbox/x/error-context"]
        for headers in ({"Authorization": ""}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic eDp5"}):
            assert {api.get(path, headers=headers).status_code for path in paths} == {401}
        assert len(self.refusals()) == 15

    def test_unknown_routes_and_parameters_are_refused(self, api: httpx.Client) -> None:
        assert api.get("/sandboxes").status_code == 404
        assert api.put("/sandbox/x").status_code == 404
        assert api.get("/sandbox", params={"perPage": 1}).status_code == 422
        assert api.get("/sandbox", params={"per_page": 101}).status_code == 422
        assert api.get("/tunnel", params={"per_page": 1}).status_code == 422
        assert self.refusals() == ["unknown", "unknown", "list_sandboxes", "list_sandboxes", "list_tunnels"]

    def test_a_token_is_for_one_sandbox(self, api: httpx.Client) -> None:
        first, second = (api.post("/sandbox", json={**self.BODY, "idempotency_key": key}).json() for key in "ab")
        auth = first["gatewayAuth"]
        base = f"{auth['gateway_url']}/{auth['user_ns']}"
        own, other = (f"{base}/{sandbox['gatewayAuth']['job_id']}" for sandbox in (first, second))
        token = {"Authorization": f"Bearer {auth['token']}"}
        files = {"file": ("x", b"x")}
        query = {"path": "/tmp/x", "sandbox_id": first["id"]}
        assert api.post(f"{own}/upload", params=query, files=files, headers=token).status_code == 200
        for headers in (token, {}, {"Authorization": "Bearer wrong"}):
            url = other if headers is token else own
            assert api.post(f"{url}/upload", params=query, files=files, headers=headers).status_code == 401
        rpc = "command_session.CommandSession/Start"
        answer = api.post(f"{other}/{rpc}", headers={**token, "content-type": "application/connect+proto"})
        assert (answer.status_code, answer.json()["code"]) == (401, "unauthenticated")
        for wrong in (
            {"params": {**query, "sandbox_id": second["id"]}, "files": files},
            {"params": {"sandbox_id": first["id"]}, "files": files},
            {"params": query, "files": {"other": ("x", b"x")}},
            {"params": query, "content": b"x"},
        ):
            assert api.post(f"{own}/upload", headers=token, **wrong).status_code == 422
        assert api.post(f"{own}/{rpc}", headers=token, json={}).status_code == 415
        live = StartRequest(command={"cmd": "/bin/bash", "args": ["-c", "cat"]}, stdin=True).SerializeToString()
        body = b"\0" + len(live).to_bytes(4, "big") + live
        stdin = api.post(f"{own}/{rpc}", headers={**token, "content-type": "application/connect+proto"}, content=body)
        assert stdin.json()["code"] == "unimplemented"
        malformed = api.post(f"{own}/{rpc}", headers={**token, "content-type": "application/connect+proto"})
        assert malformed.json()["code"] == "invalid_argument"
        assert self.refusals() == ["upload"] * 3 + ["command"] + ["upload"] * 4 + ["command"] * 3
        api.request("DELETE", "/sandbox", json={"sandbox_ids": [first["id"], second["id"]]})
