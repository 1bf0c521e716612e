"""`hvdtrain evaluate`: tests a run's saved model on held-out images of its or another data set."""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hvdtrain.base.config.command_line import TRUST
from hvdtrain.base.config.option_types import Folder, Real
from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.errors import UsageError
from hvdtrain.base.formatting import printable, some_of
from hvdtrain.base.system.memory import importing
from hvdtrain.base.system.own_code import is_code
from hvdtrain.base.system.preempt import ended_by_signals
from hvdtrain.runs.request import check, check_trusted, check_url, read_run_config
from hvdtrain.runs.schema import Manifest, find
from hvdtrain.tools.evaluate import files

if TYPE_CHECKING:
    from hvdtrain.data.folder import ImageFolder


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--dataset", default="", help="Another data set, as train takes it, with the same classes."
)
@click.option(
    "--model",
    default="",
    help="Code of your own model, FILE.py:FUNCTION, if RUN names such code and --trust-model is not "
    "given.",
)
@TRUST
@click.option(
    "--label",
    default="",
    metavar="COLUMN",
    help="Parquet files: the column of classes  [default: the run's].",
)
@click.option(
    "--validation",
    type=Real(0, 0.9),
    default=0.0,
    metavar="SHARE",
    help="Parquet files: the share of training images to test on, where there is no part for that "
    " [default: the run's].",
)
@click.option(
    "--skip-bad", is_flag=True, help="Leave damaged images out  [default: as the run did]."
)
@click.option(
    "--split",
    type=click.Choice(["validation", "test"]),
    default="validation",
    show_default=True,
    help="Which images: those that training looks at to validate, or those of test/ (TestData/), "
    "which it does not.",
)
@click.option(
    "--out",
    type=Folder(path_type=Path),
    help="Folder for the results, new or of an earlier evaluation  "
    "[default: RUN/evaluation-SPLIT].",
)
@ended_by_signals
def evaluate(
    run: Path,
    dataset: str,
    model: str,
    trust_model: bool,
    label: str,
    validation: float,
    skip_bad: bool,
    split: str,
    out: Path | None,
) -> None:
    """Test a run's saved model on every held-out image: loss, accuracy, confusion.

    \b
    hvdtrain evaluate runs/single
    hvdtrain evaluate runs/single --split test
    hvdtrain evaluate runs/single --dataset FOLDER --out results
    hvdtrain evaluate runs/single --dataset hf://datasets/NAME --label fine_label

    The classes are those of the run: the training data is not needed. The model is the final one
    (the best one if the run was trained with --save best); of a run that has not finished, the
    model of the last snapshot. A GPU is used if there is one, unless the run was told to use the
    CPU. An image counts for top-5 accuracy if its true class is among the five that the model finds
    likeliest. The folder then has confusion.csv (a row for each true class, a column for each
    predicted class), mistakes.csv (the most confident first) and evaluation.json (the figures;
    `weights` is the file that was tested, `same_data` tells by the dataset_hash whether the data
    set is the one of training).
    """
    config = _config_of(run, model)
    named_again = {"model"} if model else set()
    manifest = find(run, Manifest)
    known = manifest.class_names if manifest else None
    if dataset and (dataset == config.dataset or known):  # no other data is looked at
        named_again.add("dataset")
    check_trusted(vars(config), named_again, trust_model, run)
    check_url(dataset or config.dataset)
    out = out or _default_out(run, split, dataset)
    files.check_out(out)
    if config.device == "cuda":  # the run may have been trained on another machine
        config = dataclasses.replace(config, device="auto")
    name = dataset or config.dataset
    options = {"label": label, "validation": validation, "skip_bad": skip_bad}
    trained_on, data = _data(run, config, name, known, options)
    _tell_of_images(data)
    samples = data.test if split == "test" else data.validation
    if not samples:
        raise UsageError(f"the data set {name} has no test images: use --split validation")
    from hvdtrain.data.identity import identity

    with importing():
        from hvdtrain.models.own import code_hash
        from hvdtrain.tools.evaluate.predictions import predict  # imports torch
    from hvdtrain.base.console import count_bar

    # The side that the run was trained on. The data set may have another side by now.
    if manifest and manifest.image_size:
        config = dataclasses.replace(config, image_size=manifest.image_size)
    same_data = None
    if manifest and manifest.dataset_hash:
        same_data = identity(data) == manifest.dataset_hash
    weights = _weights(run, config)
    images = f"{len(samples)} {split} images by {weights.relative_to(run)}"
    with count_bar("evaluating") as progress:
        predictions = predict(config, weights, trained_on, samples, progress)
    facts = {
        "run": str(run),
        "weights": str(weights),
        "dataset": name,
        "split": split,
        "same_data": same_data,
    }
    files.write(out, predictions, facts)
    if manifest and manifest.model_hash != code_hash(config.model):
        click.echo(f"note: {config.model} is not the code that {run} was trained with", err=True)
    if same_data is False:
        click.echo(
            f"note: the images of {name} are not those that {run} was trained and validated on",
            err=True,
        )
    top5 = "no top-5 of so few classes"
    if predictions.top5 is not None:
        top5 = f"top-5 {predictions.top5:.4f}"
    click.echo(
        f"{images}: loss {predictions.loss:.4f}, top-1 accuracy {predictions.top1:.4f}, {top5}"
    )
    click.echo(
        f"wrote {out}: {len(predictions.mistakes)} mistakes in {files.MISTAKES}, the surest first"
    )


def _config_of(run: Path, model: str) -> RunConfig:
    """Returns the configuration of the run, with this model if one is named.

    Raises:
        UsageError: there is none, or the run is of a script.
    """
    config = read_run_config(run)
    if config.script:
        raise UsageError(
            f"{run} is of a script, which alone knows its model and how to test it: evaluate in "
            "the script, and let job.report say what came out"
        )
    return check(dataclasses.replace(config, model=model)) if model else config


def _default_out(run: Path, split: str, dataset: str) -> Path:
    """Returns the folder for results where `--out` is not given."""
    if not dataset:
        return run / f"evaluation-{split}"
    other = re.sub(r"[^\w.-]", "-", Path(dataset).name)
    return run / f"evaluation-{split}-of-{other}"


def _tell_of_images(data: "ImageFolder") -> None:
    """Prints what a user should know of the data set."""
    from hvdtrain.data.bad_images import lines_of_bad

    for line in [*(f"note: {note}" for note in data.notes), *lines_of_bad(data.bad)]:
        click.echo(line, err=True)


def _data(
    run: Path,
    config: RunConfig,
    name: str,
    known: tuple[str, ...] | None,
    options: Mapping[str, Any],
) -> "tuple[ImageFolder, ImageFolder]":
    """Returns a data set with the classes that the model knows, and the data set to test on.

    Both are one, unless the run has written no names of classes down: then that of training is
    looked at.

    Args:
        run: The run folder.
        config: The configuration of the run.
        name: The name of the data set to test on.
        known: The classes of the model, as the run's manifest names them.
        options: The options of the data set to test on, by their names in the configuration; those
            of the run hold where they are not given.

    Raises:
        UsageError: The classes of the two differ, or only one of them is a user's own data.
    """
    from hvdtrain.data.find import find_dataset_of, is_parquet

    if is_code(name) != is_code(config.dataset):
        raise UsageError(
            f"{run} was trained on {config.dataset}: your own data and images are not tested by "
            "one model"
        )
    tested = dataclasses.replace(config, dataset=name)
    if name != config.dataset and not is_parquet(name):
        tested = dataclasses.replace(tested, label="", validation=0.0)
    if is_code(name) and options["skip_bad"]:
        raise UsageError(f"--skip-bad does nothing in {name}: its code decides that")
    chosen = {option: value for option, value in options.items() if value}
    tested = dataclasses.replace(tested, **chosen)
    data = find_dataset_of(tested)
    trained_on = data
    if known is None and name != config.dataset:
        trained_on = find_dataset_of(config)
    classes = known or tuple(map(printable, trained_on.classes))
    given = tuple(map(printable, data.classes))
    if classes != given:
        raise UsageError(
            f"the model knows the classes {some_of(classes)}; {name} has {some_of(given)}"
        )
    return trained_on, data


def _weights(run: Path, config: RunConfig) -> Path:
    """Returns the file of the weights to test.

    These are the weights that `--save` keeps; of an unfinished run those of the last snapshot.

    Args:
        run: The run folder.
        config: The run's configuration.

    Raises:
        UsageError: The run has saved no weights.
    """
    from hvdtrain.job.rank.results import WEIGHTS as FINAL
    from hvdtrain.job.recording import snapshot

    final = run / FINAL
    best = run / "snapshots" / snapshot.BEST
    kept = best if config.save == "best" else final
    # Without a summary the final weights are of an earlier end, from which the run was resumed.
    is_current = config.save == "best" or (run / "summary.json").is_file()
    if not (is_current and kept.is_file()):
        last = snapshot.latest(run, lambda line: click.echo(line, err=True))
        if last:
            return last.folder / snapshot.WEIGHTS
        kept = final if final.is_file() else best
    if not kept.is_file():
        why = "is a sprint" if config.sprint else f"was trained with --save {config.save}"
        raise UsageError(f"{run} {why}: there is no model to test, nor a snapshot")
    return kept
