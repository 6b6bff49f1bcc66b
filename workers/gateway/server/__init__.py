"""The bundled rollout gateway: `create_app` for a host of one's own, `run_gateway` for a process of its own.

Its parts, from the outside in:

- ``serve`` (settings, socket, server), ``guard`` (limits on a request's head), ``app`` (routes and keys), ``exchange``
  (one request and its answer), ``control`` and ``admin`` (what workers, operators and the trainer ask), ``peers``
  (several processes as one), ``openapi``, ``metrics``, ``errors`` (every answer that is not a success)
- ``calls`` (one model call from its request to its record), ``relay`` and ``passing`` (one that is streamed),
  ``dialects`` (the APIs that agents speak), ``merge`` (what the upstream is asked), ``scan``, ``streaming``,
  ``answers``, ``jsonio`` and ``nesting`` (reading JSON)
- ``upstreams`` (choosing a model server), ``upstream`` (one of them), ``connection`` (HTTP to it), ``gate`` (pausing)
- ``recorder`` (rollouts), ``turns`` (their calls, and how they follow from each other), ``tokens`` and ``tokenstore``,
  ``integrity`` (whether all of it can be trusted), ``upkeep``
- ``log``, ``journal`` and ``snapshot`` (what a gateway that is started again still knows)

On a model call's way nothing is parsed that the call does not need: the request's JSON once, the answer is looked
through (`scan`), kept as it came, and made a `Turn` when somebody asks or nothing else is to be done.
"""

from workers.gateway.server.app import create_app
from workers.gateway.server.serve import GatewaySettings, run_gateway

__all__ = ["GatewaySettings", "create_app", "run_gateway"]
