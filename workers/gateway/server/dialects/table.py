"""The dialects that the gateway serves: a new one is a module beside this one, and a line here."""

from __future__ import annotations

from workers.gateway.server.dialects import Dialect
from workers.gateway.server.dialects.chat import Chat
from workers.gateway.server.dialects.messages import Messages
from workers.gateway.server.dialects.responses import Responses

CHAT = Chat()

DIALECTS: tuple[Dialect, ...] = (CHAT, Responses(), Messages())
