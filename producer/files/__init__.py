"""The files of a batch: where its tasks come from, and where its results go."""
