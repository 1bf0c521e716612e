"""What cannot be run, and is refused before anything starts."""

import dataclasses
import itertools
import json
import re

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain import models
from hvdtrain.base import modes
from hvdtrain.base.config.run_config import DEFAULT_EPOCHS, DEVICES, RunConfig, flag
from hvdtrain.base.errors import UsageError
from hvdtrain.base.numerics.optimizers import OPTIMIZERS
from hvdtrain.cli import cli
from hvdtrain.runs.folder import how_to_go_on
from hvdtrain.runs.request import (
    check,
    check_length,
    check_url,
    check_workers,
    for_mode,
    with_absolute_paths,
)

FIELDS = dataclasses.fields(RunConfig)
LEAST = {"vggf": 32, "vgg11_bn": 32, "cnn": 28, "resnet8": 28}  # sides of images
SERVED = {"servers": 1}
STALENESS_LR = {"mode": "ps-async", "staleness_lr": True, **SERVED}
SECRETS = [
    ("https://me:s3cret@host/coil", "a password"),
    ("simplecache::ftp://me:s3cret@host", "a password"),
    ("https://s3cret@host/coil", "a user or token"),
    ("simplecache::HTTP://s3cret@host", "a user or token"),
    ("https://host/coil?sv=1&sig=s3cret", "a token or signature"),
    ("https://host/coil?access_token=s3cret", "a token or signature"),
    ("https://host/coil?X-Amz-Date=1&x-amz-signature=s3cret", "a token or signature"),
    ("https://host/coil?X-Amz-Security-Token=s3cret", "a token or signature"),
]
REFUSED = [
    *(
        (
            {field: "nosuch"},
            f"^unknown {field} 'nosuch': choose from {re.escape(', '.join(valid))}$",
        )
        for field, valid in (
            ("mode", modes.names()),
            ("model", models.name_lists()),
            ("optimizer", OPTIMIZERS),
            ("device", DEVICES),
        )
    ),
    *(
        ({"model": name}, r"unknown model .* choose from cnn, resnet8, .* \(6n \+ 2\), vgg11, ")
        for name in ("resnet", "resnet9", "resnet08", "resnet1208", "cnn2", "VGG16")
    ),
    ({"model": "resnet18"}, "choose from .*, FILE.py:FUNCTION, torchvision.models:NAME, timm:NAME"),
    *(
        (dict(two), "--epochs, --steps, --time-budget and --sprint exclude each other: give one")
        for two in itertools.combinations([("epochs", 1), ("steps", 1), ("time_budget", 1.0)], 2)
    ),
    *(
        (
            {"model": model, "image_size": least - 1},
            f"--image-size {least - 1} is too small: {model} .* at least {least}",
        )
        for model, least in LEAST.items()
    ),
    (
        {"model": "resnet8", "dropout": 0.5},
        "--dropout does nothing in resnet8: its head is one layer",
    ),
    (
        {"model": "resnet8", "pretrained": "imagenet"},
        "--pretrained imagenet: resnet8 is not for ImageNet",
    ),
    ({"model": "cnn", "pretrained": "imagenet"}, "--pretrained imagenet: cnn is not for ImageNet"),
    *(
        ({"mode": mode}, f"--mode {mode} needs a server: add --servers 1")
        for mode in modes.names()
        if "ps-" in mode
    ),
    *(
        (
            {"mode": mode, **SERVED},
            f"--mode {mode} has no servers: drop --servers, or choose a ps- mode",
        )
        for mode in modes.names()
        if "ps-" not in mode
    ),
    *(
        ({f.name: value}, f"{flag(f.name)} {value} is not a finite number")
        for f in FIELDS
        if isinstance(f.default, float)
        for value in (float("nan"), float("inf"))
    ),
    # A run folder would hold no such number.
    *(
        ({f.name: value}, f"{flag(f.name)} {value} is too large: give a number below")
        for f in FIELDS
        for value in (1e12, 10**12)
        if type(value) is type(f.default)
    ),
    (
        {"dataset": "./\udcff"},
        "--dataset '.*' is not valid UTF-8",
    ),  # it could not be written into config.toml
    *(
        (
            STALENESS_LR | {"push_scale": scale},
            f"^--staleness-lr is for --push-scale none: in {scale} a push",
        )
        for scale in ("softsync", "mean")
    ),
    (
        {"mode": "ps-ssp", "look_ahead": 2.0, "delay_compensation": 0.04, **SERVED},
        "--look-ahead is for --push-scale softsync without --delay-compensation",
    ),
    ({"trace_steps": "3-5"}, "is for --trace: add it"),
    *(
        ({"trace": True, "trace_steps": text}, "give the first and the last step, as 100-150")
        for text in ("5", "9-3", "0-4", "a-b", "1-", "-4", "")
    ),
    *(
        ({"dataset": url}, f"^--dataset has {what} in its URL, .* such as AWS_SECRET_")
        for url, what in SECRETS
    ),
    (
        {"mode": "sharded", "local_steps": 8},
        "--local-steps is not for --mode sharded, where each rank has",
    ),
    ({"outer_momentum": 0.5}, "--outer, --outer-lr and --outer-momentum are for --local-steps"),
    *(
        (
            {"mode": "ddp", "local_steps": 8, option: value},
            f"{flag(option)}.* is not for --local-steps",
        )
        for option, value in (("shares", "measured"), ("compression", "powersgd"))
    ),
    *(
        (
            {"mode": "ddp", "local_steps": steps, "fragments": 4},
            f"--local-steps that are a multiple of it, as {fitting}$",
        )
        for steps, fitting in ((0, 4), (6, 8))
    ),
    ({"mode": "ddp", "local_steps": 8, "steps": 7}, "--steps 7 end before --local-steps 8 do"),
    (
        {"mode": "ps-ssp", "local_steps": 8, "fragments": 4, **SERVED},
        "--fragments is for workers in lockstep",
    ),
    (
        {"mode": "allreduce", "local_steps": 8, "wait_for": "layer"},
        "--local-steps waits for all weights",
    ),
    (
        {"mode": "ps-ssp", "backup": 2, **SERVED},
        "--backup does nothing in --mode ps-ssp: it is for ps-sync",
    ),
]


@pytest.mark.parametrize(("options", "words"), REFUSED, ids=str)
def test_what_cannot_be_run_is_refused(options, words):
    with pytest.raises(UsageError, match=words) as refused:
        check(RunConfig(**options))
    assert "s3cret" not in str(refused.value)


@pytest.mark.parametrize(
    "dataset",
    [
        "https://host:80/a@b?design=1",
        "sftp://me@host/coil",
        "s3://bucket/coil?versionId=1",
        "folder?token=1",
    ],
)
def test_a_url_without_a_secret_is_taken(dataset):
    check_url(dataset)


@given(st.integers(1, 100), st.integers(1, 64))
def test_every_worker_needs_a_sample_of_a_batch(batch, workers):
    config = RunConfig(mode="ddp", batch_size=batch)
    if batch >= workers:
        check_workers(config, workers)
        return
    without = f"leaves {workers - batch} of {workers} workers without a sample"
    remedy = f"take --batch-size {workers} or more, or at most {batch} worker"
    with pytest.raises(UsageError, match=f"a global batch of {batch} {without}: {remedy}"):
        check_workers(config, workers)


def test_single_is_one_process():
    check_workers(RunConfig(), 1)
    with pytest.raises(UsageError, match="--mode single is one process, but 2 were started"):
        check_workers(RunConfig(), 2)


def test_backup_workers_leave_a_push_to_wait_for():
    config = RunConfig(mode="ps-sync", servers=1, backup=2)
    check_workers(check(config), 3)
    with pytest.raises(
        UsageError, match="--backup 2 needs more workers than that, and there are 2 workers"
    ):
        check_workers(config, 2)
    assert for_mode(config, "ps-async", 1).backup == 0


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({}, DEFAULT_EPOCHS * 4),
        ({"epochs": 2}, 8),
        ({"steps": 5}, 5),
        ({"time_budget": 1.0}, None),
        ({"epochs": 1, "batch_size": 100}, 1),
        ({"epochs": 1, "batch_size": 99}, 2),
    ],
)
def test_how_many_steps_100_samples_take(options, steps):
    assert RunConfig(**options).total_steps(100) == steps


def test_the_weights_ahead_are_for_workers_that_are_behind():
    config = RunConfig(mode="ps-ssp", servers=1, look_ahead=2.0)
    assert (config.effective_look_ahead(2, None), config.effective_look_ahead(2, 3)) == (2.0, 2.0)
    assert (config.effective_look_ahead(1, None), config.effective_look_ahead(2, 0)) == (0.0, 0.0)
    other = dataclasses.replace(config, delay_compensation=0.04)
    assert other.effective_look_ahead(2, None) == 0.0


# What a mode has no use for


@pytest.mark.parametrize(
    ("mode", "option", "value", "users"),
    [
        ("ps-sync", "staleness", 3, "ps-ssp"),
        ("ps-sync", "delay_compensation", 0.04, "ps-ssp, ps-async"),
        ("allreduce", "push_scale", "none", "ps-ssp, ps-async"),
        ("ddp", "bucket_mb", 1.0, "allreduce, sharded, ps-sync, ps-ssp, ps-async"),
        ("single", "record", True, "ps-sync, ps-ssp, ps-async"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused_and_a_comparison_gives_it_to_who_uses_it(
    mode, option, value, users
):
    servers = 1 if mode == "ps-sync" else 0
    config = RunConfig(mode=mode, servers=servers, **{option: value})
    flag = "--" + option.replace("_", "-")
    with pytest.raises(
        UsageError, match=f"^{flag} does nothing in --mode {mode}: it is for {users}$"
    ):
        check(config)
    assert check(for_mode(config, mode, 1)) == RunConfig(mode=mode, servers=servers)
    assert check(for_mode(config, "ps-ssp", 1)) == RunConfig(
        mode="ps-ssp", servers=1, **{option: value}
    )


def test_a_warm_up_ends_and_a_trace_begins_before_training_ends():
    check_length(RunConfig(warmup=9), 32)
    check_length(RunConfig(warmup=9, time_budget=1.0, trace=True, trace_steps="99-99"), 32)
    check_length(RunConfig(epochs=15, trace=True, trace_steps="15-99"), 32)
    with pytest.raises(
        UsageError, match="--warmup 15 is not shorter than the training, which has 15 steps"
    ):
        check_length(RunConfig(epochs=15, warmup=15), 32)
    with pytest.raises(
        UsageError, match=r"^--local-steps 16: training has 15 steps, and would exchange nothing"
    ):
        check_length(RunConfig(mode="allreduce", epochs=15, local_steps=16), 32)
    with pytest.raises(
        UsageError, match="--trace-steps 16-99 would trace nothing: training has 15 steps"
    ):
        check_length(RunConfig(epochs=15, trace=True, trace_steps="16-99"), 32)


def test_the_home_of_an_unknown_user_is_a_folder_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = RunConfig(
        dataset="~no.one/x", model="~no.one/a.py:build", pretrained="~no.one/p.pt", width=0.0
    )
    absolute = with_absolute_paths(config)
    assert absolute.dataset == f"{tmp_path}/~no.one/x"
    assert absolute.model == f"{tmp_path}/~no.one/a.py:build"
    assert absolute.pretrained == f"{tmp_path}/~no.one/p.pt"


@pytest.mark.parametrize(
    ("inputs", "trust"),
    [
        ({"dataset": "s3://images/set"}, " --trust-model"),
        ({"model": "/tmp/mine.py:build"}, " --trust-model"),
        ({"dataset": "digits"}, ""),
    ],
)
def test_the_command_to_go_on_trusts_what_it_would_be_refused_without(inputs, trust, tmp_path):
    RunConfig(**inputs).write(tmp_path / "config.toml")
    again = f"`hvdtrain train --resume --out {tmp_path}{trust}` begins it again"
    assert how_to_go_on(tmp_path, "train") == f"nothing had been saved: {again}"


@pytest.mark.parametrize(
    "command",
    ["evaluate", "replay", "train --resume --out", "launch --launcher local -n 3 --resume --out"],
)
def test_a_url_that_a_run_folder_names_is_opened_where_it_is_named_again(command, tmp_path):
    """It may be a stranger's, and is opened with what lets this user in: in their network, and in
    their cloud.
    """
    url = "http://127.0.0.1:1/their set"
    asked = RunConfig(mode="ps-async", servers=1, record=True, dataset=url, steps=4)
    asked.write(tmp_path / "config.toml", workers=2, job="x")
    shown = {"mode": "ps-async", "servers": 1, "workers": 2, "repeat": 1, "threads_per_worker": 1}
    (tmp_path / "manifest.json").write_text(json.dumps(shown))
    before = sorted(tmp_path.rglob("*"))
    name, *words = command.split()
    of = cli.get_command(click.Context(cli), name)
    refused = CliRunner().invoke(of, [*words, str(tmp_path)]).exception
    assert isinstance(refused, UsageError), refused
    assert f"names a URL for --dataset, {url}, which may be anybody's" in str(refused)
    assert (
        f"give --dataset '{url}', or --trust-model" in str(refused)
        and sorted(tmp_path.rglob("*")) == before
    )
    if name in ("evaluate", "replay"):
        again = CliRunner().invoke(of, [str(tmp_path), "--dataset", url]).exception
        assert again and "which may be anybody's" not in str(again)
        other = CliRunner().invoke(of, [str(tmp_path), "--dataset", "digits"]).exception
        assert "which may be anybody's" in str(other) or "replay takes the same images" in str(
            other
        )
