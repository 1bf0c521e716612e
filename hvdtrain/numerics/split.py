"""Cutting as evenly as can be: batches over workers, weights over servers, images of an evaluation over workers."""

from collections.abc import Sequence

DIGESTS = 2**48  # digests of the parts of a batch add up modulo this: see training.step.digest


def even_range(total: int, index: int, parts: int) -> range:
    """The contiguous range of `total` things that is number `index` of `parts`; lengths differ by at most one."""
    return range(total * index // parts, total * (index + 1) // parts)


def proportional_range(total: int, index: int, weights: Sequence[float]) -> range:
    """The contiguous range of `total` things that is number `index` of as many parts as there are weights: lengths are
    in proportion to those, to within two things or so, and none is empty where there are enough.
    """
    parts, whole = len(weights), sum(weights)
    least = min(1, total // parts)
    starts = [0]
    for part in range(1, parts + 1):
        start = max(round(total * (sum(weights[:part]) / whole)), starts[-1] + least)
        starts.append(min(start, total - least * (parts - part)))
    return range(starts[index], starts[index + 1])


def step_of_share(number: int, workers: int) -> int:
    """The job's step that a share belongs to, from 1, by its number over the whole job."""
    return number // workers + 1


def samples_of_share(number: int, samples: int, batch_size: int, workers: int) -> int:
    """How many samples a share has, by its number over the whole job: see data.sampling.BatchSampler.share."""
    batch, slot = divmod(number, workers)
    done = batch % -(-samples // batch_size) * batch_size
    return len(even_range(min(batch_size, samples - done), slot, workers))
