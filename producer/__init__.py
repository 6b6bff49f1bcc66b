"""What a trainer or a batch job imports: requests, results, and the producer that sends one and receives the other."""

from producer.contract import RolloutRequest, RolloutResult

__all__ = ["RolloutRequest", "RolloutResult"]
