"""Batches that are copied ahead, here to the CPU: the same ones, in order, and nothing is left
behind.
"""

import threading

import pytest
import torch

from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.errors import Failure
from hvdtrain.data.sampling import Share
from hvdtrain.job.training.feed import AHEAD, Ahead, Normalise


def numbered(count, fails_at=None):
    for number in range(count):
        if number == fails_at:
            raise Failure("cannot read the image 3.png")
        yield (
            Share(number, 1, [number], 1.0, 1),
            (torch.full((1, 3, 2, 2), number, dtype=torch.uint8), torch.tensor([number])),
        )


def threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("feed")]


@pytest.mark.parametrize("count", [0, 1, AHEAD, 7])
def test_batches_come_in_order_and_all_of_them(count):
    ahead = Ahead(numbered(count), torch.device("cpu"))
    found = [
        (share.step, int(images.unique()), labels.tolist())
        for share, (images, labels) in ahead.batches()
    ]
    assert found == [(number, number, [number]) for number in range(count)]
    ahead.close()
    assert not threads()


def test_who_stops_early_leaves_no_thread():
    ahead = Ahead(numbered(100), torch.device("cpu"))
    next(ahead.batches())
    ahead.close()
    assert not threads()


def test_normal_images_have_the_mean_and_deviation_of_imagenet():
    grey = torch.full((2, 3, 4, 4), 128, dtype=torch.uint8)
    found = Normalise(RunConfig(), torch.device("cpu"))(grey)
    expected = [
        (128 / 255 - mean) / deviation
        for mean, deviation in [(0.485, 0.229), (0.456, 0.224), (0.406, 0.225)]
    ]
    torch.testing.assert_close(found[1, :, 2, 3], torch.tensor(expected))
    assert found.dtype is torch.float32 and int(grey[0, 0, 0, 0]) == 128
