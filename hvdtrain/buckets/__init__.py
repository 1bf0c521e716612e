"""Flat gradients in buckets that travel alone, for servers and for rings: `partition` cuts the vector, in `exchange` a
bucket's gradients come together as backward computes them, leave, and are awaited as weights, `staging` is a bucket's
way off a GPU and its answer's back.
"""
