"""The rollout gateway: its protocol, our client of it, and the bundled server."""
