"""Flat gradients in buckets that are sent one by one, to servers and around rings.

- `partition` cuts the flat vector into buckets.
- `exchange` gathers a bucket's gradients as backward computes them, sends the bucket, and waits
  for its weights.
- `gradient_check` checks that each step has all gradients.
- `staging` copies buckets off a GPU, and weights back.
- `local_steps` takes several steps of a worker between two exchanges; `local_rounds` lets any mode
  carry what they came to.
"""
