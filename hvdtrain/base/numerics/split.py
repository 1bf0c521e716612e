"""Even splits: batches and images of an evaluation over workers, weights over servers."""

from collections.abc import Sequence

# Digests of the parts of a batch add up modulo this: see training.step.digest.
DIGESTS = 2**48


def even_range(total: int, index: int, parts: int) -> range:
    """Returns one of `parts` contiguous ranges of `total` items.

    Lengths of ranges differ by at most one.

    Args:
        index: the range's number, from 0.
    """
    return range(total * index // parts, total * (index + 1) // parts)


def proportional_range(total: int, index: int, weights: Sequence[float]) -> range:
    """Returns one of as many contiguous ranges of `total` items as there are weights.

    Lengths are proportional to the weights, to within some two items. No range is empty if there
    are enough items.

    Args:
        index: the range's number, from 0.
    """
    parts = len(weights)
    whole = sum(weights)
    least = min(1, total // parts)
    starts = [0]
    for part in range(1, parts + 1):
        start = max(round(total * (sum(weights[:part]) / whole)), starts[-1] + least)
        starts.append(min(start, total - least * (parts - part)))
    return range(starts[index], starts[index + 1])


def step_of_share(number: int, workers: int) -> int:
    """Returns the job's step, from 1, of a share by its number over the whole job."""
    return number // workers + 1


def steps_before_round(number: int, steps_per_epoch: int, every: int) -> int:
    """Returns how many steps of the job precede a round of local steps.

    Args:
        number: the round's number over the whole job, from 0.
        every: the steps of a round. The last round of an epoch may have fewer.
    """
    rounds_per_epoch = -(-steps_per_epoch // every)
    epochs, rounds = divmod(number, rounds_per_epoch)
    return epochs * steps_per_epoch + rounds * every


def samples_of_share(
    number: int,
    samples: int,
    batch_size: int,
    workers: int,
    every: int = 1,
    after: int = 0,
    until: int | None = None,
) -> int:
    """Returns how many samples a share has: see data.sampling.BatchSampler.share.

    Args:
        number: the share's number over the whole job.
        samples: the size of the training set.
        every: how many steps a share covers, with --local-steps.
        after, until: the job trains the steps after `after`, up to `until`.
    """
    round_number, slot = divmod(number, workers)
    steps_per_epoch = -(-samples // batch_size)
    first = max(after, steps_before_round(round_number, steps_per_epoch, every))
    end = steps_before_round(round_number + 1, steps_per_epoch, every)
    if until is not None:
        end = min(end, until)
    count = 0
    for step in range(first, end):
        done_in_epoch = step % steps_per_epoch * batch_size
        batch = min(batch_size, samples - done_in_epoch)
        count += len(even_range(batch, slot, workers))
    return count
