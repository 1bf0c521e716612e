"""Random changes to training images: the same wherever they are made."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.data import loader
from hvdtrain.data.augment import KINDS, Augment
from hvdtrain.data.folder import scan
from hvdtrain.data.loader import Loader
from hvdtrain.data.sampling import BatchSampler

pytestmark = pytest.mark.usefixtures("one_thread")

IMAGE = (
    torch.arange(1, 1 + 3 * 16 * 16, dtype=torch.int32)
    .remainder(251)
    .to(torch.uint8)
    .view(3, 16, 16)
)


def changes(kind, seed=0):
    return [
        Augment(kind, seed).change(IMAGE, epoch, index) for epoch in (1, 2) for index in range(40)
    ]


def test_flip_mirrors_about_half():
    flipped = [torch.equal(image, IMAGE.flip(-1)) for image in changes("flip")]
    assert all(
        torch.equal(image, IMAGE) or mirrored
        for image, mirrored in zip(changes("flip"), flipped, strict=True)
    )
    assert 0.3 < np.mean(flipped) < 0.7


@pytest.mark.parametrize(("kind", "mirrors"), [("shift", False), ("shift-flip", True)])
def test_shift_moves_by_up_to_an_eighth_and_fills_with_black(kind, mirrors):
    padded = torch.nn.functional.pad(IMAGE, (2, 2, 2, 2))
    windows = [padded[:, y : y + 16, x : x + 16] for y in range(5) for x in range(5)]
    windows += [window.flip(-1) for window in windows]
    seen = set()
    for image in changes(kind):
        [number] = [i for i, window in enumerate(windows) if torch.equal(image, window)]
        seen.add(number)
    assert len({i % 25 for i in seen}) > 15
    assert (max(seen) >= 25) == mirrors


@given(
    st.tuples(st.integers(1, 300), st.integers(1, 300)), st.integers(1, 99), st.integers(0, 10**6)
)
def test_a_crop_lies_in_the_image(size, epoch, index):
    left, upper, right, lower = Augment("crop-flip", 0).box(size, epoch, index)
    assert -1e-9 <= left < right <= size[0] + 1e-9 and -1e-9 <= upper < lower <= size[1] + 1e-9


def test_crops_cover_eight_to_a_hundred_percent():
    boxes = [Augment("crop-flip", 0).box((200, 200), 1, index) for index in range(500)]
    areas = [(r - x) * (b - y) / 200**2 for x, y, r, b in boxes]
    ratios = [(r - x) / (b - y) for x, y, r, b in boxes]
    assert min(areas) >= 0.079 and max(areas) > 0.9
    assert 0.749 <= min(ratios) < 0.8 and 1.25 < max(ratios) <= 1.334


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cache", [True, False])
def test_what_a_sample_looks_like_does_not_depend_on_the_number_of_workers(
    kind, cache, small, monkeypatch
):
    if not cache:
        monkeypatch.setattr(loader, "CACHE_BYTES", 0)
    samples = scan(small).train

    def seen(workers, epoch, seed=0):
        images = {}
        for worker in range(workers):
            shares = BatchSampler(len(samples), 8, 0, worker, workers).epoch(epoch)
            for share, (batch, _) in Loader(samples, 32, 2, Augment(kind, seed)).batches(shares):
                counted = share.indices[: share.counted]
                images |= {index: batch[i] for i, index in enumerate(counted)}
        return images

    one, two = seen(1, 1), seen(2, 1)
    assert one.keys() == two.keys() == set(range(len(samples)))
    assert all(torch.equal(one[i], two[i]) for i in one)
    later, other = seen(1, 2), seen(1, 1, seed=1)
    assert all(torch.equal(one[i], later[i]) for i in one) == (kind == "none")
    assert all(torch.equal(one[i], other[i]) for i in one) == (kind == "none")
