"""The bundled rollout gateway: `create_app` for a host of one's own, `run_gateway` for a process of its own.

Its parts, from the outside in: ``app`` (routes and keys), ``calls`` (one model call from its request to its record),
``chat`` (the chat-completions dialect), ``streaming`` (event streams), ``nesting`` (how deep JSON may be),
``tokens``, ``recorder`` (rollouts and their turns), ``upstream`` (the transport to the model), ``errors`` (every answer
that is not a success).
"""

from workers.gateway.server.app import create_app
from workers.gateway.server.serve import GatewaySettings, run_gateway

__all__ = ["GatewaySettings", "create_app", "run_gateway"]
