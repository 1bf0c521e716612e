"""What a job is asked to do: out to a command line or a file and back, and what is refused."""

import dataclasses
import itertools
import tempfile
from pathlib import Path

import click
import pytest
import tomli_w
from hypothesis import example, given
from hypothesis import strategies as st

from hvdtrain import models, modes
from hvdtrain.config.file import read_config
from hvdtrain.config.option_types import LONGEST_S, Duration, Names, Numbers
from hvdtrain.config.run_config import DEFAULT_EPOCHS, DEVICES, LENGTHS, SAVES, RunConfig
from hvdtrain.data import augment
from hvdtrain.errors import UsageError
from hvdtrain.numerics.optimizers import OPTIMIZERS
from hvdtrain.runs.request import check, check_workers, config_of, for_mode, train_options

FIELDS = dataclasses.fields(RunConfig)
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
POSITIVE = st.floats(0, exclude_min=True, allow_infinity=False)
DURATION = st.floats(0, LONGEST_S, exclude_min=True)

# Every option with every value that its type allows: a new option without a line here fails the first test.
VALUES = {
    "mode": TEXT, "dataset": TEXT, "model": TEXT, "pretrained": TEXT, "optimizer": TEXT,
    "device": st.sampled_from(DEVICES),
    "servers": st.integers(0), "image_size": st.integers(0), "batch_size": st.integers(1), "epochs": st.integers(0),
    "steps": st.integers(0), "threads": st.integers(0, 1024), "seed": st.integers(0, 2**32 - 1),
    "width": st.floats(0, 4), "dropout": st.floats(0, 1, exclude_max=True),
    "momentum": st.floats(0, 1, exclude_max=True), "target_accuracy": st.floats(0, 1), "lr": POSITIVE,
    "weight_decay": st.floats(0, allow_infinity=False), "time_budget": st.just(0.0) | DURATION, "timeout": DURATION,
    "schedule": st.sampled_from(["cosine", "constant", "step"]),
    "push_scale": st.sampled_from(["softsync", "mean", "none"]),
    "deterministic": st.booleans(), "repeat": st.integers(1, 10**6),
    "look_ahead": st.floats(0, 4), "slow": TEXT, "trace": st.booleans(), "trace_steps": TEXT,
    "staleness": st.integers(0), "delay_compensation": st.floats(0, allow_infinity=False),
    "staleness_lr": st.booleans(), "compression": TEXT, "bucket_mb": st.floats(0, 32, exclude_min=True),
    "augment": st.sampled_from(augment.KINDS), "freeze": st.sampled_from(["none", "features"]),
    "precision": st.sampled_from(["fp32", "tf32", "bf16", "fp16"]),
    "accumulate": st.integers(1), "per_worker": st.booleans(),
    "lr_scaling": st.sampled_from(["none", "sqrt", "linear"]), "step_epochs": st.integers(1),
    "step_factor": st.floats(0, 1, exclude_min=True), "stop_at_target": st.booleans(),
    "snapshot_every": st.sampled_from(["epoch", "never", "10m", "90"]), "keep_snapshots": st.integers(1),
    "log_every": st.integers(0), "compile": st.booleans(), "share_gpu": st.booleans(),
    "shares": st.sampled_from(["auto", "static", "leased"]), "backup": st.integers(0),
    "save": st.sampled_from(SAVES), "record": st.booleans(), "warmup": st.integers(0), "nesterov": st.booleans(),
}  # fmt: skip
CONFIGS = st.builds(RunConfig, **VALUES)


@click.command()
@train_options()
def command(**options):
    return RunConfig(**options)


def from_args(args):
    return command.main(args, standalone_mode=False)


def in_file(text):
    """read_config of a file that holds this text or these bytes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.toml"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return read_config(path)


# There and back


def test_every_option_is_tried_below():
    assert set(VALUES) == {f.name for f in FIELDS}


@given(CONFIGS)
@example(RunConfig(dataset="--model", lr=5e-324, width=1e-300))
@example(RunConfig(time_budget=1e-05, timeout=LONGEST_S))
def test_to_the_command_line_and_back(config):
    assert from_args(config.to_args()) == config


@given(CONFIGS)
def test_to_a_file_and_back(config):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.toml"
        config.write(path, workers=4, job="17")
        assert RunConfig(**read_config(path)) == config


@pytest.mark.parametrize("f", FIELDS, ids=lambda f: f.name)
def test_one_option_alone_is_all_that_the_command_line_says(f):
    value = {
        "mode": "ddp",
        "schedule": "constant",
        "push_scale": "none",
        "augment": "flip",
        "freeze": "features",
        "precision": "bf16",
        "device": "cpu",
        "lr_scaling": "sqrt",
        "snapshot_every": "10m",
        "shares": "static",
        "save": "best",
    }.get(f.name, {str: "other", int: 7, float: 0.5, bool: True}[type(f.default)])
    config = RunConfig(**{f.name: value})
    flag = "--" + f.name.replace("_", "-")
    assert config.to_args() == [flag] if value is True else [flag, str(value)]
    assert from_args(config.to_args()) == config


@pytest.mark.parametrize(
    ("name", "word", "meaning", "value"),
    [("threads", "auto", 0, 3), ("epochs", "auto", 0, 2), ("image_size", "auto", 0, 48), ("width", "auto", 0.0, 0.5),
     ("steps", "none", 0, 9), ("time_budget", "none", 0.0, 60.0), ("log_every", "never", 0, 20),
     ("pretrained", "none", "", "file.pth")],
)  # fmt: skip
def test_a_word_stands_where_a_number_used_to(name, word, meaning, value, tmp_path):
    flag = "--" + name.replace("_", "-")
    assert from_args([flag, word]) == RunConfig() == RunConfig(**in_file(tomli_w.dumps({name: meaning})))
    whole = RunConfig().to_args(whole=True)
    assert (flag in whole) == (name not in LENGTHS) and (flag not in whole or whole[whole.index(flag) + 1] == word)
    RunConfig().write(tmp_path / "config.toml")
    assert f'{name} = "{word}"' in (tmp_path / "config.toml").read_text().splitlines()
    assert read_config(tmp_path / "config.toml")[name] == meaning
    assert in_file(tomli_w.dumps({name: value})) == {name: value}
    if name != "pretrained":  # a file of weights may have any name
        with pytest.raises(UsageError, match=f"{name} = 'other' should be of type"):
            in_file(f'{name} = "other"')


def test_only_the_default_model_is_narrow_by_default(tmp_path):
    assert RunConfig().taken_width == 1 / 8 and RunConfig(width=0.5).taken_width == 0.5
    assert {RunConfig(model=name).taken_width for name in ("vgg16", "vgg11_bn", "resnet8", "cnn")} == {1.0}
    assert RunConfig(**in_file('model = "vgg16"\nwidth = 0.125')).taken_width == 1 / 8  # a run of before


def test_a_default_configuration_needs_no_options():
    assert RunConfig().to_args() == []
    assert from_args([]) == RunConfig()


def test_short_flags():
    assert from_args(["-s", "2", "-b", "48"]) == RunConfig(servers=2, batch_size=48)


def test_options_can_be_left_out_and_have_other_defaults():
    @click.command()
    @train_options("mode", "servers", epochs=3)
    def some(**options):
        return options

    options = some.main([], standalone_mode=False)
    assert options.keys() == {f.name for f in FIELDS} - {"mode", "servers"}
    assert options["epochs"] == 3


# Values on the command line


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("90s", 90), ("1.5m", 90), ("30m", 1800), ("2h", 7200), (" 2 h ", 7200), ("1e-05", 1e-5)],
)
def test_durations(text, seconds):
    assert Duration().convert(text, None, None) == seconds


@pytest.mark.parametrize("text", ["0", "0h", "", "h", "-5", "5d", "1:30", "nan", "inf", "1e400", "9" * 400, "5 5"])
def test_what_is_no_duration_is_refused_with_examples(text):
    with pytest.raises(click.BadParameter, match="is not a duration such as 90s, 30m or 2h"):
        Duration().convert(text, None, None)


@pytest.mark.parametrize(
    "args",
    [
        ["--width", "0"], ["--width", "4.1"], ["--dropout", "1"], ["--momentum", "1"], ["--batch-size", "0"],
        ["--epochs", "-1"], ["--steps", "-1"], ["--lr", "0"], ["--lr", "-1"], ["--schedule", "linear"],
        ["--push-scale", "sum"], ["--seed", "-1"], ["--seed", str(2**32)], ["--servers", "-1"],
        ["--image-size", "-32"], ["--target-accuracy", "1.1"], ["--timeout", "0"], ["--time-budget", "soon"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_values_out_of_range_are_refused_and_name_the_option(args):
    with pytest.raises(click.BadParameter) as refused:
        from_args(args)
    assert args[0] in refused.value.format_message()


@pytest.mark.parametrize(("text", "numbers"), [("2", [2]), ("1,2,4", [1, 2, 4]), ("4, 2,4", [4, 2])])
def test_lists_of_numbers(text, numbers):
    assert Numbers().convert(text, None, None) == numbers


@pytest.mark.parametrize("text", ["", "0", "1,0", "-1", "1,,2", "two", "1.5", "1;2"])
def test_what_is_no_list_of_numbers_is_refused(text):
    with pytest.raises(click.BadParameter, match="whole numbers such as 1,2,4"):
        Numbers().convert(text, None, None)


def test_lists_of_names():
    assert Names().convert("single, ddp,single", None, None) == ["single", "ddp"]


# What cannot be run


@pytest.mark.parametrize(
    ("field", "valid"),
    [("mode", modes.names()), ("model", models.name_lists()), ("optimizer", OPTIMIZERS), ("device", DEVICES)],
)
def test_an_unknown_name_lists_the_valid_ones(field, valid):
    with pytest.raises(UsageError) as refused:
        check(RunConfig(**{field: "nosuch"}))
    assert str(refused.value) == f"unknown {field} 'nosuch': choose from {', '.join(valid)}"


def test_every_valid_name_is_accepted():
    for mode in modes.names():
        check(RunConfig(mode=mode, servers=1 if mode.startswith("ps-") else 0))
    for optimizer, device in itertools.product(OPTIMIZERS, DEVICES):
        check(RunConfig(optimizer=optimizer, device=device))
    for model in (name for family in models.families() for name in family.NAMES):
        check(RunConfig(model=model))


@pytest.mark.parametrize("two", list(itertools.combinations([("epochs", 1), ("steps", 1), ("time_budget", 1.0)], 2)))
def test_two_ends_of_training_exclude_each_other(two):
    with pytest.raises(UsageError, match="--epochs, --steps and --time-budget exclude each other: give one"):
        check(RunConfig(**dict(two)))


@pytest.mark.parametrize(("model", "least"), [("vggf", 32), ("vgg11_bn", 32), ("cnn", 28), ("resnet8", 28)])
def test_too_small_images_are_refused_with_the_models_least_size(model, least):
    for side in (1, 16, least - 1):
        with pytest.raises(UsageError, match=f"--image-size {side} is too small: {model} .* at least {least}"):
            check(RunConfig(model=model, image_size=side))
    check(RunConfig(model=model, image_size=least))


@pytest.mark.parametrize(
    "model", ["resnet", "resnet9", "resnet2", "resnet08", "resnet1208", "cnn2", "vgg16_bn_", "VGG16"]
)
def test_almost_the_name_of_a_model_is_none(model):
    with pytest.raises(UsageError, match=r"unknown model .* choose from cnn, resnet8, .* \(6n \+ 2\), vgg11, "):
        check(RunConfig(model=model))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": "resnet8", "dropout": 0.5}, "--dropout does nothing in resnet8: its head is one layer"),
        ({"model": "resnet8", "pretrained": "imagenet"}, "--pretrained imagenet: resnet8 is not for ImageNet"),
        ({"model": "cnn", "pretrained": "imagenet"}, "--pretrained imagenet: cnn is not for ImageNet"),
    ],
)
def test_what_a_model_can_do_nothing_with_is_refused(options, words):
    with pytest.raises(UsageError, match=words):
        check(RunConfig(**options))
    check(RunConfig(model="cnn", dropout=0.5, pretrained="file.pth"))
    check(RunConfig(model="vggf", width=1.0, dropout=0.5, pretrained="imagenet"))


@pytest.mark.parametrize("mode", modes.names())
def test_servers_belong_to_the_ps_modes_alone(mode):
    if mode.startswith("ps-"):
        with pytest.raises(UsageError, match=f"--mode {mode} needs a server: add --servers 1"):
            check(RunConfig(mode=mode))
    else:
        with pytest.raises(UsageError, match=f"--mode {mode} has no servers: drop --servers, or choose a ps- mode"):
            check(RunConfig(mode=mode, servers=1))


@pytest.mark.parametrize("field", [f.name for f in FIELDS if isinstance(f.default, float)])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused(field, value):
    with pytest.raises(UsageError, match=f"--{field.replace('_', '-')} {value} is not a finite number"):
        check(RunConfig(**{field: value}))


def test_bytes_that_are_no_text_are_refused():
    """They could not be written into config.toml."""
    with pytest.raises(UsageError, match="--dataset '.*' is not valid UTF-8"):
        check(RunConfig(dataset="./\udcff"))


@given(st.integers(1, 100), st.integers(1, 64))
def test_every_worker_needs_a_sample_of_a_batch(batch, workers):
    config = RunConfig(mode="ddp", batch_size=batch)
    if batch >= workers:
        check_workers(config, workers)
        return
    with pytest.raises(UsageError, match=f"a global batch of {batch} leaves {workers} workers without a sample each"):
        check_workers(config, workers)


def test_single_is_one_process():
    check_workers(RunConfig(), 1)
    with pytest.raises(UsageError, match="--mode single is one process, but 2 were started"):
        check_workers(RunConfig(), 2)


def test_backup_workers_leave_a_push_to_wait_for_and_are_for_ps_sync():
    config = RunConfig(mode="ps-sync", servers=1, backup=2)
    check_workers(check(config), 3)
    with pytest.raises(UsageError, match=r"--backup 2 leaves no push of 2 worker\(s\) to wait for"):
        check_workers(config, 2)
    with pytest.raises(UsageError, match="--backup does nothing in --mode ps-ssp: it is for ps-sync"):
        check(dataclasses.replace(config, mode="ps-ssp"))
    assert for_mode(config, "ps-async", 1).backup == 0


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({}, DEFAULT_EPOCHS * 4), ({"epochs": 2}, 8), ({"steps": 5}, 5), ({"time_budget": 1.0}, None),
        ({"epochs": 1, "batch_size": 100}, 1), ({"epochs": 1, "batch_size": 99}, 2),
    ],
)  # fmt: skip
def test_how_many_steps_100_samples_take(options, steps):
    assert RunConfig(**options).total_steps(100) == steps


# Files that are not what save() wrote


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"\xff\xfe\x00\x01" * 50, "cannot read the configuration .*config.toml"),
        ("mode = ", "cannot read the configuration .*Invalid value"),
        ('mode = "ddp"\nmode = "ddp"', "cannot read the configuration .*overwrite"),
        ("x = " + "[" * 100_000, "nested too deeply"),
        ("seed = " + "9" * 5000, "cannot read the configuration"),
        ('colour = "red"', "unknown option in the configuration 'colour': choose from mode, servers, dataset"),
        ("[mode]\nx = 1", "mode = .* should be of type str"),
        ("mode = 3", "mode = 3 should be of type str"),
        ('batch_size = "32"', "batch_size = '32' should be of type int"),
        ("batch_size = 32.0", "batch_size = 32.0 should be of type int"),
        ("seed = true", "seed = True should be of type int"),
        ("lr = true", "lr = True should be of type float"),
        ("deterministic = 1", "deterministic = 1 should be of type bool"),
        ("lr = [0.1]", "lr = .* should be of type float"),
        ("epochs = 1979-05-27", "epochs = .* should be of type int"),
        ("batch_size = 0", "config.toml: batch_size: 0 is not in the range"),
        ("steps = -1", "config.toml: steps: -1 is not in the range"),
        ("lr = " + "9" * 400, "config.toml: lr: int too large"),
        ("time_budget = -5.0", "config.toml: time_budget: '-5.0' is not a duration"),
        ("timeout = 0", "config.toml: timeout: '0.0' is not a duration"),
        ("timeout = nan", "config.toml: timeout: 'nan' is not a duration"),
        ('schedule = "linear"', "config.toml: schedule: 'linear' is not one of 'cosine', 'constant'"),
        ('push_scale = "sum"', "config.toml: push_scale: 'sum' is not one of 'softsync', 'mean', 'none'"),
    ],
    ids=lambda value: str(value[:20]),
)
def test_broken_and_hostile_files_are_refused(text, words):
    with pytest.raises(UsageError, match=words) as refused:
        in_file(text)
    assert "\n" not in str(refused.value)


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    for path in (tmp_path / "nosuch.toml", tmp_path):
        with pytest.raises(UsageError, match="cannot read the configuration"):
            read_config(path)


def test_whole_numbers_stand_for_floats_and_what_is_remembered_is_passed_over():
    read = in_file('lr = 1\nworkers = 4\njob = "17"')
    assert read == {"lr": 1.0}
    assert type(read["lr"]) is float


@given(
    st.dictionaries(
        st.sampled_from([f.name for f in FIELDS]),
        st.integers() | st.floats(allow_nan=False) | st.booleans() | TEXT | st.sampled_from(["constant", "none"]),
    )
)
def test_what_a_file_may_say_the_command_line_may_say_too(values):
    try:
        config = RunConfig(**in_file(tomli_w.dumps(values)))
    except UsageError:
        return
    assert from_args(config.to_args()) == config


@given(st.binary(max_size=200) | st.text().map(str.encode))
def test_no_bytes_make_reading_fail_in_another_way(content):
    try:
        RunConfig(**in_file(content))
    except UsageError:
        pass


def test_the_weights_ahead_are_for_workers_that_are_behind():
    config = RunConfig(mode="ps-ssp", servers=1, look_ahead=2.0)
    assert (config.taken_look_ahead(2, None), config.taken_look_ahead(2, 3)) == (2.0, 2.0)
    assert (config.taken_look_ahead(1, None), config.taken_look_ahead(2, 0)) == (0.0, 0.0)
    other = dataclasses.replace(config, delay_compensation=0.04)
    assert other.taken_look_ahead(2, None) == 0.0
    with pytest.raises(UsageError, match="--look-ahead is for --push-scale softsync without --delay-compensation"):
        check(other)


@pytest.mark.parametrize("push_scale", ["softsync", "mean"])
def test_a_push_that_counts_one_nth_is_not_divided_by_its_staleness_too(push_scale, tmp_path):
    config = RunConfig(mode="ps-async", servers=1, staleness_lr=True, push_scale=push_scale)
    with pytest.raises(UsageError, match=f"^--staleness-lr is for --push-scale none: in {push_scale} a push"):
        check(config)
    check(dataclasses.replace(config, push_scale="none"))
    config.write(tmp_path / "config.toml")  # by an older version
    assert config_of(tmp_path) == config


# What a mode has no use for


@pytest.mark.parametrize(
    ("mode", "option", "value", "users"),
    [
        ("ps-sync", "staleness", 3, "ps-ssp"),
        ("ps-sync", "delay_compensation", 0.04, "ps-async, ps-ssp"),
        ("allreduce", "push_scale", "none", "ps-async, ps-ssp"),
        ("ddp", "bucket_mb", 1.0, "ps-async, ps-ssp, ps-sync"),
        ("single", "record", True, "ps-async, ps-ssp, ps-sync"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused_and_a_comparison_gives_it_to_who_uses_it(
    mode, option, value, users
):
    servers = 1 if mode == "ps-sync" else 0
    config = RunConfig(mode=mode, servers=servers, **{option: value})
    flag = "--" + option.replace("_", "-")
    with pytest.raises(UsageError, match=f"^{flag} does nothing in --mode {mode}: it is for {users}$"):
        check(config)
    assert check(for_mode(config, mode, 1)) == RunConfig(mode=mode, servers=servers)
    assert check(for_mode(config, "ps-ssp", 1)) == RunConfig(mode="ps-ssp", servers=1, **{option: value})


def test_a_warm_up_ends_before_training_does():
    RunConfig(warmup=9).check_length(32)
    RunConfig(warmup=9, time_budget=1.0).check_length(32)
    with pytest.raises(UsageError, match="--warmup 15 is not over before training is, which has 15 steps"):
        RunConfig(warmup=15).check_length(32)
