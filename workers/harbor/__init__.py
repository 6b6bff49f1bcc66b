"""Tasks in Harbor's format as rollouts: the environment, the agents that it can run, and one agent of our own."""
