"""Where agents run: one small protocol and its providers."""
