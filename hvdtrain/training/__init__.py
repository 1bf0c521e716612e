"""The training loop of a worker, and what it needs: batches, evaluation, decisions between steps, saving."""
