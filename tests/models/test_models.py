"""VGG, what all models share, where their weights come from, and the optimizers that move them."""

import argparse
import io
import json
import math
import os
import pickle
import re
import shlex
import subprocess
import sys
import time
import warnings
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import archives
from helpers.servers import serving
from safetensors.torch import save_file
from torch import nn

from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.errors import Failure, UsageError
from hvdtrain.base.numerics.optimizers import lr_at
from hvdtrain.job.training.model import initial_model, load_weights
from hvdtrain.models import make, pretrained, vgg
from hvdtrain.models.layers import average_pool_by_matmul
from hvdtrain.models.pretrained import load_pretrained

pytestmark = pytest.mark.usefixtures("one_thread")

SOME = [*vgg.NAMES, "cnn", "resnet8", "resnet20"]
TINY = 1 / 16


def shapes(model):
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


# Layers


@pytest.mark.parametrize("name", vgg.PUBLISHED)
def test_width_1_is_torchvisions_model_by_name_and_shape(name):
    import torchvision  # and with it torch's compiler, which takes 2 s

    with torch.device("meta"):
        ours, theirs = make(name, 10), getattr(torchvision.models, name)(num_classes=10)
    assert shapes(ours) == shapes(theirs)
    assert list(ours.state_dict()) == list(theirs.state_dict())


def test_vggf_is_vgg16_with_a_funnel_for_a_last_layer():
    with torch.device("meta"):
        vggf, vgg16 = shapes(make("vggf", 3)), shapes(make("vgg16", 1000))
    head = {
        name: shape
        for name, shape in vggf.items()
        if name.startswith("classifier") and "weight" in name
    }
    assert list(head.values()) == [(4096, 25088), (4096, 4096), (1024, 4096), (256, 1024), (3, 256)]
    body = {name: shape for name, shape in vgg16.items() if not name.startswith("classifier.6.")}
    assert body.items() <= vggf.items()


def test_width_scales_channels_and_head_but_not_the_classes():
    with torch.device("meta"):
        half = make("vggf", 10, width=0.5)
    assert half.features[0].out_channels == 32
    assert [m.out_features for m in half.classifier if isinstance(m, nn.Linear)] == [
        2048,
        2048,
        512,
        128,
        10,
    ]


@pytest.mark.parametrize("name", SOME)
def test_every_model_trains_on_one_small_image(name):
    """One image is what a worker may be left with; batch norm then has the pixels of one image
    only.
    """
    model = make(name, 4, TINY)
    scores = model(torch.randn(1, 3, 32, 32))
    assert scores.shape == (1, 4)
    scores.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", ["vgg11", "vgg13_bn", "vggf", "cnn", "resnet8"])
@pytest.mark.parametrize("side", [32, 33, 64, 100, 224])
def test_any_image_size_gives_scores(name, side):
    model = make(name, 5, TINY).eval()
    with torch.inference_mode():
        assert model(torch.randn(2, 3, side, side)).shape == (2, 5)
        assert model(torch.randn(1, 3, side, side + 7)).shape == (1, 5)


@pytest.mark.parametrize("width", [TINY, 1 / 8, 1 / 4])
@pytest.mark.parametrize("name", ["vgg11", "vgg16", "vggf"])
def test_the_signal_survives_at_every_width(name, width):
    torch.manual_seed(0)
    with torch.inference_mode():
        deviation = make(name, 100, width).eval()(torch.randn(8, 3, 64, 64)).std().item()
    assert 0.05 < deviation < 20


def test_dropout_is_in_the_wide_layers_of_the_head():
    model = make("vggf", 3, TINY, dropout=0.25)
    assert [m.p for m in model.modules() if isinstance(m, nn.Dropout)] == [0.25, 0.25]


def test_the_seed_alone_decides_the_initial_weights():
    config = RunConfig(model="vgg11", width=TINY, seed=5)
    first = initial_model(config, 3).state_dict()
    torch.rand(7)
    second = initial_model(config, 3).state_dict()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    other = initial_model(RunConfig(model="vgg11", width=TINY, seed=6), 3).state_dict()
    assert not torch.equal(first["features.0.weight"], other["features.0.weight"])


# Weights from a file


@pytest.fixture(scope="module")
def trained():
    """Weights that no fresh model has."""
    torch.manual_seed(99)
    return {name: torch.randn_like(t) for name, t in make("vgg11", 3, TINY).state_dict().items()}


def fresh(classes=3, width=TINY):
    torch.manual_seed(0)
    return make("vgg11", classes, width)


@pytest.mark.parametrize(
    ("file", "save"), [("w.pth", torch.save), ("w.pt", torch.save), ("w.safetensors", save_file)]
)
def test_weights_are_loaded_from_files_of_every_kind(tmp_path, trained, file, save):
    save(trained, tmp_path / file)
    model = fresh()
    assert load_pretrained(model, "vgg11", str(tmp_path / file)) == []
    assert all(torch.equal(tensor, trained[name]) for name, tensor in model.state_dict().items())


def prefixed(weights, prefix):
    return {f"{prefix}{name}": tensor for name, tensor in weights.items()}


def noise(weights):
    return {name: torch.rand_like(tensor) for name, tensor in weights.items()}


OPTIMIZER = {"state": {0: {"exp_avg": torch.zeros(3)}}, "param_groups": [{"lr": 0.1}]}


@pytest.mark.parametrize(
    ("wrap", "told"),
    [
        (lambda w: {"epoch": 3, "state_dict": w, "optimizer": OPTIMIZER}, ["key state_dict"]),
        (
            lambda w: {"model_state_dict": w, "optimizer_state_dict": OPTIMIZER},
            ["model_state_dict"],
        ),
        (lambda w: {"model": w, "args": {"lr": 0.1}}, ["those of its key model"]),
        (lambda w: {"state": {"net": w}}, ["those of its key state.net"]),
        (lambda w: {"student": w, "step": torch.tensor(7)}, ["those of its key student"]),
        (
            lambda w: {"ema": noise(w), "model": w},
            ["those of its key model; what ema has would fit too"],
        ),
        (lambda w: prefixed(w, "module."), ["without module."]),
        (lambda w: prefixed(w, "_orig_mod."), ["without _orig_mod."]),
        (lambda w: prefixed(w, "module._orig_mod."), ["without module._orig_mod."]),
        (lambda w: prefixed(w, "_orig_mod.module."), ["without _orig_mod.module."]),
        (
            lambda w: {"model": prefixed(w, "_orig_mod.model.")},
            ["key model", "without _orig_mod.model."],
        ),
        # DataParallel of a part of the model, as in torch's example for ImageNet: vsepp#10, where a
        # list of models was saved too
        (
            lambda w: {
                "model": [{key.replace("features.", "features.module."): w[key] for key in w}]
            },
            ["those of its key model.0", "without module."],
        ),
        # torch.compile and FSDP of a part of the model
        (
            lambda w: {name.replace(".", "._orig_mod.", 1): tensor for name, tensor in w.items()},
            ["without _orig_mod."],
        ),
        # the model as a part of another: mmpretrain, MoCo and DenseCL
        (
            lambda w: {"state_dict": prefixed(w, "backbone.")},
            ["key state_dict", "without backbone."],
        ),
        (
            lambda w: prefixed(w, "module.encoder_q.0.") | prefixed(noise(w), "other."),
            ["without module.encoder_q.0."],
        ),
        (
            lambda w: prefixed(w, "backbone.") | {"classifier.6.bias": torch.zeros(3)},
            ["without backbone."],
        ),
        # torch.optim.swa_utils.AveragedModel
        (lambda w: {"n_averaged": torch.tensor(5), **prefixed(w, "module.")}, ["without module."]),
    ],
)
def test_wrappings_are_taken_off_and_told(tmp_path, trained, wrap, told):
    path = tmp_path / "w.pth"
    torch.save(wrap(trained), path)
    model = fresh()
    lines = load_pretrained(model, "vgg11", str(path))
    assert all(torch.equal(tensor, trained[name]) for name, tensor in model.state_dict().items())
    assert len(lines) == len(told)
    for line, words in zip(lines, told, strict=True):
        assert line.startswith(f"--pretrained {path}: ") and words in line


def test_a_densenet_of_before_torch_0_4_is_read(tmp_path):
    """As of zoogzog/chexnet#11 and CSAILVision/places365#53."""
    torch.manual_seed(1)
    model = torch.nn.Module()
    model.norm1, model.conv1 = torch.nn.BatchNorm2d(3), torch.nn.Conv2d(3, 3, 1)
    new = {
        name: torch.rand_like(tensor) for name, tensor in model.state_dict().items() if tensor.ndim
    }
    old = {f"module.{name.replace('1', '.1', 1)}": tensor for name, tensor in new.items()}
    torch.save({"state_dict": old}, tmp_path / "w.pth.tar")
    lines = load_pretrained(model, "mine.py:build", str(tmp_path / "w.pth.tar"))
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in new.items())
    assert lines[1:] == [
        f"--pretrained skipped norm1.num_batches_tracked and all like it (1): not in {tmp_path}/w.pth.tar"
    ]


def test_a_model_whose_own_names_begin_so_keeps_them(tmp_path):
    torch.manual_seed(0)
    inner = torch.nn.Linear(3, 2)
    own = torch.nn.Module()
    own.model = inner
    torch.save(own.state_dict(), tmp_path / "own.pth")
    torch.save(inner.state_dict(), tmp_path / "inner.pth")
    before = inner.weight.detach().clone()
    for file, told in (("own.pth", 0), ("inner.pth", 1)):
        torch.nn.init.zeros_(inner.weight)
        lines = load_pretrained(own, "mine.py:build", str(tmp_path / file))
        assert len(lines) == told and torch.equal(own.model.weight, before)
    assert lines[0].endswith("names were read as if they had model.")


class Whole(torch.nn.Linear):
    """A model of which not the weights are saved, but the object."""


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (Whole(2, 2), "Whole"),
        (
            {"model": {"w": torch.zeros(2)}, "args": argparse.Namespace(lr=0.1)},
            "argparse.Namespace",
        ),
        ({"state_dict": {"w": torch.zeros(2)}, "best": np.float64(0.5)}, "numpy.*scalar"),
        ({"state_dict": {"w": torch.zeros(2)}, "out": Path("runs")}, "pathlib"),
    ],
)
def test_more_than_tensors_is_refused_with_the_line_that_saves_them(tmp_path, value, named):
    torch.save(value, tmp_path / "w.pth")
    with pytest.raises(UsageError, match=rf"holds more than tensors \(.*{named}.*\)") as refused:
        load_pretrained(fresh(), "vgg11", str(tmp_path / "w.pth"))
    line = str(refused.value)
    assert line.endswith('torch.save(model.state_dict(), "weights.pth")') and len(line) < 400
    assert "\n" not in line and "\x1b" not in line


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "`git lfs pull`"),
        (b"<!DOCTYPE html><html><head><title>Google Drive", "is a web page"),
        (b"\x89HDF\r\n\x1a\n", "is HDF5"),
        (b"\x93NUMPY\1\0", "is an array of numpy"),
        (b"\x1f\x8b\x08", "is an archive: unpack it"),
        (archives.tarred({"w.pth": b"x"}), "is an archive: unpack it"),
        (archives.zipped({"w.pth": b"x"}), "is a zip with w.pth: unpack it"),
        (archives.zipped({"a.npy": b"x"}), "is numpy's .npz"),
        (pickle.dumps({"model": [1]}), "is a pickle of another version than torch's"),
        (
            b"e\1garbage",
            r"is no file that torch.save or safetensors writes, .* begins with b'e\\x01",
        ),
        (b"garbage\n" * 99, "is no file that torch.save or safetensors writes"),
    ],
    # A zip has the time at which it was made, and the processes of pytest-xdist must agree on names.
    ids=lambda value: "content" if isinstance(value, bytes) else value,
)
def test_what_downloads_leave_in_place_of_weights_is_named(tmp_path, content, words):
    (tmp_path / "w.pth").write_bytes(content)
    with pytest.raises(UsageError, match=words):
        load_pretrained(fresh(), "vgg11", str(tmp_path / "w.pth"))


def test_safetensors_are_read_by_content_and_a_folder_lists_its_files(tmp_path, trained):
    save_file(trained, tmp_path / "w.bin")
    assert load_pretrained(fresh(), "vgg11", str(tmp_path / "w.bin")) == []
    with pytest.raises(UsageError, match="is a folder: give a file in it, w.bin"):
        load_pretrained(fresh(), "vgg11", str(tmp_path))
    (tmp_path / "none").mkdir()
    with pytest.raises(UsageError, match="is a folder without a .pth"):
        load_pretrained(fresh(), "vgg11", str(tmp_path / "none"))


def shards(folder, weights):
    """A checkpoint in two files, as Hugging Face's libraries save large ones."""
    places = {}
    for number, names in enumerate((list(weights)[:10], list(weights)[10:]), 1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: weights[name] for name in names}, folder / file)
        places |= dict.fromkeys(names, file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}), encoding="utf-8")
    return index


def test_a_checkpoint_in_several_files_is_read_by_its_index(tmp_path, trained):
    """As huggingface/diffusers#14811 has one."""
    index = shards(tmp_path, trained)
    model = fresh()
    assert load_pretrained(model, "vgg11", str(index)) == []
    assert all(torch.equal(tensor, trained[name]) for name, tensor in model.state_dict().items())
    one = "model-00001-of-00002.safetensors"
    for place, words in (
        (tmp_path, f"is a folder: give a file in it, {index.name}$"),
        (
            tmp_path / one,
            f"is one of 2 files of a checkpoint: give the index of them, {index.name}",
        ),
    ):
        with pytest.raises(UsageError, match=words):
            load_pretrained(fresh(), "vgg11", str(place))
    (tmp_path / one).unlink()
    with pytest.raises(UsageError, match=f"names {one}, which is not beside it"):
        load_pretrained(fresh(), "vgg11", str(index))
    index.write_text('{"weight_map": {"a": "../../etc/passwd"}}', encoding="utf-8")
    with pytest.raises(UsageError, match="names passwd, which is not beside it"):
        load_pretrained(fresh(), "vgg11", str(index))
    index.write_text("[]", encoding="utf-8")
    with pytest.raises(UsageError, match="is no index of a checkpoint's files"):
        load_pretrained(fresh(), "vgg11", str(index))


def test_what_programs_have_unpacked_is_named_with_the_line_that_packs_it(tmp_path, trained):
    """As in XPengZhao/NeRF2#6: a .pth is a zip, which programs unpack."""
    torch.save(trained, tmp_path / "w.pth")
    with zipfile.ZipFile(tmp_path / "w.pth") as packed:
        packed.extractall(tmp_path / "out")
    with pytest.raises(UsageError, match="is a folder: give a file in it, w/data.pkl"):
        load_pretrained(fresh(), "vgg11", str(tmp_path / "out"))
    for place in ("out/w/data.pkl", "out/w"):
        with pytest.raises(UsageError, match="is the inside of a .pth file") as refused:
            load_pretrained(fresh(), "vgg11", str(tmp_path / place))
    command = re.search("`(.*)`", str(refused.value))[1]
    words = command.replace("python", shlex.quote(sys.executable), 1)
    subprocess.run(words, shell=True, check=True, timeout=60)
    model = fresh()
    assert load_pretrained(model, "vgg11", str(tmp_path / "out" / "weights.pth")) == []
    assert all(torch.equal(tensor, trained[name]) for name, tensor in model.state_dict().items())


def test_a_distributed_checkpoint_is_named_with_the_line_that_converts_it(tmp_path):
    """As NVlabs/cosmos-policy#16 has one."""
    (tmp_path / ".metadata").write_bytes(b"x")
    (tmp_path / "__0_0.distcp").write_bytes(b"x")
    for place in (tmp_path, tmp_path / "__0_0.distcp"):
        with pytest.raises(UsageError, match=rf"dcp_to_torch {tmp_path} weights.pth`$"):
            load_pretrained(fresh(), "vgg11", str(place))


@pytest.mark.parametrize("wrap", [lambda w: (w, {"epoch": 3}), lambda w: [7, w], lambda w: {0: w}])
def test_weights_in_a_list_are_found(tmp_path, trained, wrap):
    torch.save(wrap(trained), tmp_path / "w.pth")
    model = fresh()
    [line] = load_pretrained(model, "vgg11", str(tmp_path / "w.pth"))
    assert re.search("the weights are those of its key [01]$", line)
    assert all(torch.equal(tensor, trained[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_diverged_are_refused(tmp_path, trained, value):
    """As in cardwing/Codes-for-PVKD#9. What does not fit is not looked at."""
    bad = {name: tensor.clone() for name, tensor in trained.items()}
    bad["classifier.6.weight"][:] = value
    torch.save(bad, tmp_path / "w.pth")
    model, before = fresh(), fresh().state_dict()
    words = (
        r"768 of the 768 values of classifier.6.weight are NaN or infinite: .* cannot work\. Give"
    )
    with pytest.raises(UsageError, match=words):
        load_pretrained(model, "vgg11", str(tmp_path / "w.pth"))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    load_pretrained(fresh(classes=7), "vgg11", str(tmp_path / "w.pth"))
    bad["features.0.bias"][0] = value
    torch.save(bad, tmp_path / "w.pth")
    words = "1 of the 4 values of features.0.bias .* infinite, and so are values of 1 other tensor:"
    with pytest.raises(UsageError, match=words):
        load_pretrained(model, "vgg11", str(tmp_path / "w.pth"))


def test_what_fits_is_loaded_and_the_rest_is_named(tmp_path, trained):
    path = tmp_path / "w.pth"
    torch.save(
        {k: v for k, v in trained.items() if k != "features.0.bias"} | {"strange": torch.zeros(1)},
        path,
    )
    model, before = fresh(classes=7), fresh(classes=7).state_dict()
    assert load_pretrained(model, "vgg11", str(path)) == [
        f"--pretrained skipped features.0.bias: not in {path}",
        f"--pretrained skipped classifier.6.weight: (3, 256) in {path}, (7, 256) here",
        f"--pretrained skipped classifier.6.bias: (3,) in {path}, (7,) here",
    ]
    for name, tensor in model.state_dict().items():
        kept = name in ("features.0.bias", "classifier.6.weight", "classifier.6.bias")
        assert torch.equal(tensor, before[name] if kept else trained[name]), name


class Hostile:
    def __init__(self, victim):
        self.victim = victim

    def __reduce__(self):
        return os.mkdir, (str(self.victim),)


@pytest.mark.parametrize(
    "save", [torch.save, lambda value, path: path.write_bytes(pickle.dumps(value))]
)
@pytest.mark.parametrize(
    "hide", [lambda bad: bad, lambda bad: {"state_dict": {"features.0.bias": bad}}]
)
def test_code_in_a_file_is_refused_and_does_not_run(tmp_path, save, hide):
    save(hide(Hostile(tmp_path / "ran")), tmp_path / "w.pth")
    with pytest.raises(
        UsageError, match="more than tensors .*mkdir|is a pickle of another version .* might run"
    ):
        load_pretrained(fresh(), "vgg11", str(tmp_path / "w.pth"))
    assert not (tmp_path / "ran").exists()


def test_broken_files_are_refused_in_one_line(tmp_path, trained):
    torch.save(trained, tmp_path / "whole.pth")
    save_file(trained, tmp_path / "whole.safetensors")
    model, before = fresh(), fresh().state_dict()
    for name, content in (
        ("cut.pth", (tmp_path / "whole.pth").read_bytes()[:-100]),
        ("cut.safetensors", (tmp_path / "whole.safetensors").read_bytes()[:-100]),
        ("length.safetensors", b"\xff" * 64),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(
            UsageError, match=f"--pretrained .*{name} is not a file of plain weights: .*cut short"
        ) as refused:
            load_pretrained(model, "vgg11", str(tmp_path / name))
        assert "\n" not in str(refused.value)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(3),
        [torch.zeros(3)],
        ({"epoch": 3}, 7),
        None,
        7,
        {"epoch": 3},
        {"state_dict": 3},
        {1: torch.zeros(3)},
        {"features.0.bias": torch.zeros(4, device="meta")},
        {"features.0.bias": torch.zeros(4, dtype=torch.cfloat)},
        {"features.0.bias": torch.zeros(4).to_sparse()},
    ],
    ids=str,
)
def test_what_is_no_dictionary_of_plain_tensors_is_refused(tmp_path, value):
    torch.save(value, tmp_path / "w.pth")
    with (
        pytest.raises(UsageError, match="holds no dictionary of names and plain tensors"),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # torch's, of having to look a sparse tensor through
        load_pretrained(fresh(), "vgg11", str(tmp_path / "w.pth"))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({}, "by name: in it there is nothing; the model has features.0.weight"),
        (
            {"state_dict": {"other": torch.zeros(3)}},
            "by name: under state_dict there is other; the model has features.0.weight, .* more",
        ),
        (
            {"features.0.bias": torch.zeros(9)},
            r"by shape: features.0.bias is \(9,\) there, and \(4,\) here: .* need --width 1",
        ),
    ],
)
def test_a_file_of_which_nothing_fits_is_refused(tmp_path, value, words):
    torch.save(value, tmp_path / "w.pth")
    with pytest.raises(UsageError, match=f"nothing in it fits vgg11 {words}"):
        load_pretrained(fresh(), "vgg11", str(tmp_path / "w.pth"))
    with pytest.raises(
        UsageError, match="no such file; give `imagenet` or a .pth, .pt or .safetensors file"
    ):
        load_pretrained(fresh(), "vgg11", str(tmp_path / "absent.pth"))


def test_a_broken_download_says_which_file_to_remove(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    kept = tmp_path / "hub" / "checkpoints" / "vgg11-8a719046.pth"
    kept.parent.mkdir(parents=True)
    hostile = pickle.dumps(Hostile(tmp_path / "ran"))
    for content in (b"", b"these are not the weights\n", b"PK\x03\x04cut short", hostile):
        kept.write_bytes(content)
        with pytest.raises(Failure, match=f"broken: remove {kept} and repeat the command"):
            load_pretrained(fresh(), "vgg11", "imagenet")
    assert not (tmp_path / "ran").exists()


class Published:
    """As torchvision describes weights, on a server of this machine."""

    def __init__(self, url):
        self.url = url

    def get_state_dict(self, progress, check_hash, weights_only):
        time.sleep(0.2)  # so that others come meanwhile
        return torch.hub.load_state_dict_from_url(
            self.url, progress=progress, weights_only=weights_only
        )


def test_weights_are_downloaded_once_a_host(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    config = RunConfig(model="vgg11", width=TINY, pretrained="imagenet")
    content = io.BytesIO()
    torch.save(initial_model(config, 3).state_dict(), content)
    with serving({"/w.pth": content.getvalue()}) as server:
        monkeypatch.setattr(pretrained, "_published", lambda name: Published(f"{server.url}/w.pth"))
        with ThreadPoolExecutor(3) as ranks:
            skipped = list(
                ranks.map(lambda model: load_weights(model, config), [fresh() for _ in range(3)])
            )
        assert skipped == [[]] * 3
        assert len(server.asked) == 1
    load_weights(fresh(), config)  # without the server


def test_a_host_without_a_network_is_told_how_to_bring_weights(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(
        pretrained, "_published", lambda name: Published("http://127.0.0.1:1/w.pth")
    )
    place = tmp_path / "hub" / "checkpoints" / "w.pth"
    with pytest.raises(
        Failure, match=f"cannot download http://127.0.0.1:1/w.pth .*put it at {place} on every host"
    ):
        load_weights(fresh(), RunConfig(model="vgg11", width=TINY, pretrained="imagenet"))


# Optimizers


def test_cosine_by_hand():
    config = RunConfig(lr=2.0)
    rates = [lr_at(config, step, 1, 4) for step in (1, 2, 3, 4)]
    assert rates == pytest.approx([2.0, 1 + math.sqrt(0.5), 1.0, 1 - math.sqrt(0.5)])


def test_the_rate_is_constant_if_asked_or_if_nobody_knows_the_last_step():
    assert [lr_at(RunConfig(lr=2.0, schedule="constant"), step, 1, 4) for step in (1, 4)] == [
        2.0,
        2.0,
    ]
    assert lr_at(RunConfig(lr=2.0, schedule="cosine", steps=4), 4, 1, 4) < 1
    assert [lr_at(RunConfig(lr=2.0), step, 1, None) for step in (1, 10**6)] == [2.0, 2.0]


@pytest.mark.parametrize("side", [1, 2, 5, 7, 8, 14])
def test_means_over_a_grid_are_those_of_torch(side):
    maps = torch.randn(2, 3, side, side, dtype=torch.float64, requires_grad=True)
    pooled, expected = (
        average_pool_by_matmul(maps, 7),
        torch.nn.functional.adaptive_avg_pool2d(maps, 7),
    )
    torch.testing.assert_close(pooled, expected)
    weights = torch.randn_like(expected)
    ours, theirs = (
        torch.autograd.grad((means * weights).sum(), maps)[0] for means in (pooled, expected)
    )
    torch.testing.assert_close(ours, theirs)
