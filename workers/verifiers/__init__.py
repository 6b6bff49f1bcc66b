"""Runs the episodes of verifiers' environments in a worker, for `rollouts env-server` (extra ``verifiers``)."""
