"""The training loop of a worker, with batches, evaluation, decisions between steps, and saving."""
