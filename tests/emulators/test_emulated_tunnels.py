"""Tunnels of the emulator and its stand-in frpc, under the unmodified SDK."""

from __future__ import annotations

import asyncio
import base64
import socket
from pathlib import Path
from typing import Any

import httpx
import prime_tunnel
import prime_tunnel.binary
import pytest
from prime_tunnel import Tunnel
from prime_tunnel.core.client import TunnelClient
from prime_tunnel.exceptions import TunnelAuthError, TunnelError, TunnelGoneError, TunnelLimitReachedError

from emulators.drive import NOTHING, alive, echo, go, local_server, tunnel_to, until
from emulators.prime import PrimeEmulator
from emulators.prime.handle import FRPC_VERSION


class TestTunnels:
    def test_requests_reach_the_local_port(self, emulator: PrimeEmulator) -> None:
        async def main() -> None:
            async with (
                local_server(echo) as port,
                tunnel_to(port, labels=["fleet", "w1"], name="n") as tunnel,
                httpx.AsyncClient() as http,
            ):
                answer = await http.post(f"{tunnel.url}/v1/x?y=%20z", content=b"body" * 1000)
                assert answer.text == "POST /v1/x?y=%20z HTTP/1.1\n" + "body" * 1000
                status = await tunnel.status()
                assert (status.running, status.registration, status.gone) == (True, "connected", False)
                async with TunnelClient() as client:
                    (listed,) = await client.list_tunnels(labels=["fleet"])
                    assert (listed.tunnel_id, listed.labels) == (tunnel.tunnel_id, ["fleet", "w1"])
                known = emulator.tunnels()[-1]
                assert (known["local_port"], known["status"], known["name"]) == (port, "connected", "n")
                assert emulator.leaked() == {**NOTHING, "tunnels": [tunnel.tunnel_id]}
            assert not alive(known["frpc_pid"])

        assert prime_tunnel.binary.FRPC_VERSION == FRPC_VERSION
        go(main)

    def test_a_streamed_answer_comes_chunk_by_chunk(self, emulator: PrimeEmulator) -> None:
        go_on = asyncio.Event()

        async def stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            for number in range(3):
                writer.write(b"9\r\ndata: %d\n\n\r\n" % number)
                await go_on.wait()
                go_on.clear()
            writer.write(b"0\r\n\r\n")
            writer.close()

        async def main() -> None:
            async with local_server(stream) as port, tunnel_to(port) as tunnel, httpx.AsyncClient() as http:
                got = []
                async with http.stream("GET", f"{tunnel.url}/sse") as answer:
                    async for chunk in answer.aiter_text():
                        got.append(chunk)
                        go_on.set()  # the next is not sent before this one has arrived
                assert got == ["data: 0\n\n", "data: 1\n\n", "data: 2\n\n"]

        go(main)

    def test_the_death_of_frpc_breaks_the_url_until_it_is_restarted(self, emulator: PrimeEmulator) -> None:
        async def main() -> None:
            async with local_server(echo) as port, tunnel_to(port) as tunnel, httpx.AsyncClient() as http:
                url = tunnel.url
                assert emulator.kill_frpc(tunnel.tunnel_id)
                assert (await http.get(f"{url}/x")).status_code == 502
                status = await tunnel.status()
                assert (status.running, status.registration, status.gone) == (False, "disconnected", False)
                assert await tunnel.restart() == url
                assert (await http.get(f"{url}/x")).status_code == 200

        go(main)

    def test_the_death_of_frpc_cuts_running_requests(self, emulator: PrimeEmulator) -> None:
        arrived = asyncio.Event()

        async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            arrived.set()
            await reader.read()
            writer.close()

        async def main() -> None:
            async with local_server(silent) as port, tunnel_to(port) as tunnel, httpx.AsyncClient() as http:
                asked = asyncio.create_task(http.get(f"{tunnel.url}/x"))
                await arrived.wait()
                emulator.kill_frpc()
                with pytest.raises(httpx.TransportError):
                    await asked

        go(main)

    def test_a_deleted_registration_is_gone_though_frpc_lives(self, emulator: PrimeEmulator) -> None:
        async def main() -> None:
            async with local_server(echo) as port, tunnel_to(port) as tunnel, httpx.AsyncClient() as http:
                emulator.delete_tunnel(tunnel.tunnel_id)
                assert (await http.get(f"{tunnel.url}/x")).status_code == 404
                await until(lambda: asyncio.to_thread(lambda: tunnel.is_gone))
                assert tunnel.is_running
                assert "connect to server error: tunnel not registered" in tunnel.recent_output[-1]
                assert not await tunnel.check_registered()
                with pytest.raises(TunnelGoneError):
                    await tunnel.restart()
                async with tunnel_to(port) as replacement:
                    assert replacement.url != tunnel.url
                    assert (await http.get(f"{replacement.url}/x")).status_code == 200

        go(main)

    def test_an_expired_registration_says_so(self, emulator: PrimeEmulator) -> None:
        async def main() -> None:
            async with local_server(echo) as port, tunnel_to(port) as tunnel:
                emulator.delete_tunnel(status="expired")
                status = await tunnel.status()
                assert (status.registration, status.gone) == ("expired", True)
                await until(lambda: asyncio.to_thread(lambda: "tunnel is inactive" in tunnel.recent_output[-1]))

        go(main)

    def test_a_disconnected_tunnel_whose_frpc_lives(self, emulator: PrimeEmulator) -> None:
        async def main() -> None:
            async with local_server(echo) as port, tunnel_to(port) as tunnel, httpx.AsyncClient() as http:
                emulator.disconnect_tunnel(tunnel.tunnel_id)
                status = await tunnel.status()
                assert (status.running, status.registration, status.gone) == (True, "disconnected", False)
                assert (await http.get(f"{tunnel.url}/x")).status_code == 502
                await tunnel.restart()
                assert (await tunnel.status()).registration == "connected"
                assert (await http.get(f"{tunnel.url}/x")).status_code == 200

        go(main)

    def test_frpc_connects_again_by_itself(self, emulator: PrimeEmulator) -> None:
        async def main() -> None:
            async with local_server(echo) as port, tunnel_to(port) as tunnel, httpx.AsyncClient() as http:
                emulator.cut_tunnel(tunnel.tunnel_id)

                async def connected_again() -> bool:
                    return len([line for line in tunnel.recent_output if "start proxy success" in line]) == 2

                await until(connected_again)
                assert (await tunnel.status()).registration == "connected"
                assert (await http.get(f"{tunnel.url}/x")).status_code == 200

        go(main)

    def test_a_wrong_token_is_rejected(self, emulator: PrimeEmulator) -> None:
        async def main() -> None:
            async with local_server(echo) as port, tunnel_to(port) as tunnel:
                config = Path(emulator.home) / ".prime" / "tunnels" / f"{tunnel.tunnel_id}.toml"
                config.write_text(config.read_text().replace("auth.token = ", 'auth.token = "wrong" #'))
                with pytest.raises(TunnelError, match="invalid authentication token"):
                    await tunnel.restart()

        go(main)

    def test_the_limit(self, emulator: PrimeEmulator) -> None:
        async def main() -> None:
            emulator.limit_tunnels(1)
            async with local_server(echo) as port, tunnel_to(port):
                with pytest.raises(TunnelLimitReachedError, match="maximum number of"):
                    await Tunnel(port).start()

        go(main)

    @pytest.mark.parametrize(("status", "words"), [(401, "unauthorized"), (402, "Payment required")])
    def test_bad_credentials_and_no_money(self, emulator: PrimeEmulator, status: int, words: str) -> None:
        emulator.fault("create_tunnel", status=status)
        with pytest.raises(TunnelAuthError, match=words):
            asyncio.run(Tunnel(1).start())

    def test_a_registration_dropped_after_its_effect_is_repeated_and_leaks(self, emulator: PrimeEmulator) -> None:
        async def main() -> None:
            emulator.fault("create_tunnel", drop="after")
            async with local_server(echo) as port, tunnel_to(port, labels=["lost"]) as tunnel, TunnelClient() as client:
                (lost,) = set(emulator.leaked()["tunnels"]) - {tunnel.tunnel_id}
                result = await client.bulk_delete_tunnels(labels=["lost"], status="pending")
                assert result["succeeded"] == [lost]

        go(main)

    def test_nobody_listens_on_the_local_port(self, emulator: PrimeEmulator) -> None:
        async def main() -> None:
            with socket.socket() as taken:
                taken.bind(("127.0.0.1", 0))  # so that nobody else can begin to listen
                async with tunnel_to(taken.getsockname()[1]) as tunnel, httpx.AsyncClient() as http:
                    assert (await http.get(f"{tunnel.url}/x")).status_code == 502

        go(main)

    def test_basic_auth_guards_the_url(self, emulator: PrimeEmulator) -> None:
        async def main() -> None:
            async with local_server(echo) as port, tunnel_to(port, http_user="u") as tunnel, httpx.AsyncClient() as h:
                assert (await h.get(f"{tunnel.url}/x")).status_code == 401
                secret = base64.b64encode(f"u:{tunnel.http_password}".encode()).decode()
                headers = {"authorization": f"Basic {secret}"}
                assert (await h.get(f"{tunnel.url}/x", headers=headers)).status_code == 200

        go(main)

    @pytest.mark.parametrize("drop", ["before", "after"])
    def test_forwarded_requests_fail_too(self, emulator: PrimeEmulator, drop: Any) -> None:
        arrived: list[bool] = []

        async def note(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            arrived.append(True)
            await echo(reader, writer)

        async def main() -> None:
            async with local_server(note) as port, tunnel_to(port) as tunnel, httpx.AsyncClient() as http:
                emulator.fault("forwarded", drop=drop)
                with pytest.raises(httpx.TransportError):
                    await http.post(f"{tunnel.url}/x", content=b"x")
                assert len(arrived) == (1 if drop == "after" else 0)
                emulator.fault("forwarded", status=504)
                assert (await http.get(f"{tunnel.url}/x")).status_code == 504
                assert (await http.get(f"{tunnel.url}/x")).status_code == 200

        go(main)
