"""What a user's own training script holds: a thin layer above the exchange that our loop uses.

`handle` is what the script calls, `optimizer` what becomes of the optimizer that it hands in,
`gradients` how gradients come together in each kind of mode, `steps` what is counted and decided
after each step, and `sampler` which samples a worker has. Nothing here sends anything: the mode's
Synchroniser does.
"""
