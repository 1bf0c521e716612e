"""Flat gradients in buckets that travel alone, for servers and for rings: `partition` cuts the vector, in `bucketer` a
bucket's gradients come together as backward computes them, `staging` is a bucket's way off a GPU and its answer's back.
"""
