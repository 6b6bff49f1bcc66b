"""How a sandbox reaches the gateway: one small protocol and its providers."""
