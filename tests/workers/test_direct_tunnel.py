"""The tunnel that is none."""

from __future__ import annotations

import asyncio

import pytest

from workers.tunnels.direct import DirectTunnels


@pytest.mark.parametrize(
    ("gateway_url", "url", "host"),
    [
        ("http://127.0.0.1:8080", "http://127.0.0.1:8080", "127.0.0.1"),
        ("http://gateway.example:8080/", "http://gateway.example:8080", "gateway.example"),
        ("https://[::1]:8443/base/", "https://[::1]:8443/base", "::1"),
    ],
)
def test_it_hands_out_the_gateways_own_address(gateway_url: str, url: str, host: str) -> None:
    async def main() -> None:
        tunnels = DirectTunnels()
        async with tunnels.lease(gateway_url) as lease:
            assert (lease.url, lease.local_addr, lease.tunnel_id) == (url, host, None)
        await tunnels.aclose()

    asyncio.run(main())


def test_broken_waits_for_ever_and_can_be_cancelled() -> None:
    async def main() -> None:
        async with DirectTunnels().lease("http://127.0.0.1:1") as lease:
            waiting = asyncio.create_task(lease.broken())
            done, _ = await asyncio.wait([waiting], timeout=0.05)
            assert not done
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting

    asyncio.run(main())
