"""Cutting as evenly as can be: batches over workers, weights over servers, images of an evaluation over workers."""


def even_range(total: int, index: int, parts: int) -> range:
    """The contiguous range of `total` things that is number `index` of `parts`; lengths differ by at most one."""
    return range(total * index // parts, total * (index + 1) // parts)


def step_of_share(number: int, workers: int) -> int:
    """The job's step that a share belongs to, from 1, by its number over the whole job."""
    return number // workers + 1


def samples_of_share(number: int, samples: int, batch_size: int, workers: int) -> int:
    """How many samples a share has, by its number over the whole job: see data.sampling.BatchSampler.share."""
    batch, slot = divmod(number, workers)
    done = batch % -(-samples // batch_size) * batch_size
    return len(even_range(min(batch_size, samples - done), slot, workers))
