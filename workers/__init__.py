"""What runs rollouts: the Celery worker, its pool, the flow, and the systems it touches."""
