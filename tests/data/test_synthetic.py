"""`--dataset synthetic`: noise in the shape of images, without files."""

import pytest
import torch

from hvdtrain.base.config.command_line import given_options
from hvdtrain.comparing.command import compare
from hvdtrain.data.find import find_dataset
from hvdtrain.data.identity import identity
from hvdtrain.data.image import check, read
from hvdtrain.data.image_side import native_side
from hvdtrain.data.loader import Loader
from hvdtrain.data.sampling import Share
from hvdtrain.job.rank.command import train


def test_it_is_the_same_everywhere_and_opens_no_image(monkeypatch):
    monkeypatch.setattr("hvdtrain.data.loader.open_image", None)
    data = find_dataset("synthetic")
    assert (len(data.train), len(data.validation), len(data.classes)) == (1280, 64, 1000)
    assert (
        identity(data) == "synthetic:1"
        and native_side(data) == 224
        and data == find_dataset("synthetic")
    )
    loader = Loader(data.train[:96], side=32, threads=1)
    shares = [Share(1, 1, list(range(first, first + 32)), 1.0, 32) for first in (0, 32, 64)]
    (_, (images, labels)), (_, (others, _)), (_, (equal, _)) = loader.batches(shares)
    assert images.shape == (32, 3, 32, 32) and images.dtype == torch.uint8
    assert labels.tolist() == list(range(32))
    assert torch.equal(images, equal) and not torch.equal(images, others)
    assert 120 < images.float().mean() < 135


def test_an_image_is_what_its_file_would_be():
    sample, _ = find_dataset("synthetic").validation[0]
    assert check(read(sample), "it") == (224, 224) and sample.name == "1280.png"


@pytest.mark.parametrize("command", [train, compare])
def test_it_may_be_asked_for_in_one_word(command):
    context = command.make_context("it", ["--synthetic", "--steps", "3"])
    assert (context.params["dataset"], context.params["steps"]) == ("synthetic", 3)
    assert given_options(context, ["dataset", "epochs"]) == {"dataset"}
