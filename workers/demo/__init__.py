"""The demo: small tasks, an agent that works on them, an environment that scores it, and models to ask."""

#: The id under which the stand-in model serves; in a file of its own weight, so that naming it loads no server.
STAND_IN = "stand-in"
