"""Cutting as evenly as can be: batches over workers, weights over servers, images of an evaluation over workers."""


def even_range(total: int, index: int, parts: int) -> range:
    """The contiguous range of `total` things that is number `index` of `parts`; lengths differ by at most one."""
    return range(total * index // parts, total * (index + 1) // parts)
