"""The door for prime-rl: serves verifiers' environment-server protocol, and has the fleet run the episodes."""
