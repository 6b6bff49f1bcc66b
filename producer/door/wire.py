"""The fixed words of the door: small, for the command line reads them."""

from __future__ import annotations

from enum import StrEnum

#: The name under which workers offer this environment.
VERIFIERS = "verifiers"


class Wire(StrEnum):
    """The forms of an answer, of which a client understands one.

    Sources: ``verifiers.v1.serve`` of 0.4.0; of its main branch in August 2026, which prime-rl pins.
    """

    DELTAS = "deltas"  #: ``[request_id, kind, data]``: traces come as deltas, the reply has the rest (verifiers 0.4)
    WHOLE = "whole"  #: ``[request_id, data]``: the reply has the whole episode (before 0.4)
