"""`hvdtrain evaluate`: a run's saved model on held-out images, of the data set that it was trained on or of another."""

import dataclasses
import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hvdtrain.config.command_line import TRUST
from hvdtrain.config.option_types import Folder
from hvdtrain.config.run_config import RunConfig
from hvdtrain.errors import UsageError
from hvdtrain.evaluate import files
from hvdtrain.runs.request import check, check_trusted, check_url, config_of
from hvdtrain.system.memory import importing
from hvdtrain.system.own_code import is_code

if TYPE_CHECKING:
    from hvdtrain.data.folder import ImageFolder


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--dataset", default="", help="Another data set, as train takes it, with the same classes.")
@click.option("--model", default="", help="Your model's code, FILE.py:FUNCTION, where it is not taken as RUN names it.")
@TRUST
@click.option(
    "--split", type=click.Choice(["validation", "test"]), default="validation", show_default=True,
    help="Which images: those that training looks at to validate, or those of test/ (TestData/), which it does not.",
)  # fmt: skip
@click.option(
    "--out", type=Folder(path_type=Path),
    help="Folder for the results, new or of an earlier evaluation  [default: RUN/evaluation-SPLIT].",
)  # fmt: skip
def evaluate(run: Path, dataset: str, model: str, trust_model: bool, split: str, out: Path | None) -> None:
    """Test the model that a run saved on every held-out image: loss, accuracy, and what it takes for what.

    \b
    hvdtrain evaluate runs/single
    hvdtrain evaluate runs/single --split test
    hvdtrain evaluate runs/single --dataset FOLDER --out results

    It is the final model, or of a run with --save best the best one; of a run that has not finished, that of its last
    snapshot. A GPU computes where the host has one, unless the run was told to use the CPU. The true class of an image
    counts for top-5 accuracy if it is among the five that the model finds likeliest. The folder then holds
    confusion.csv (a row a true class, a column an answer), mistakes.csv (the most confident first) and evaluation.json
    (the figures; `weights` says which were tested, `same_data` whether the data set is that of training, by its
    dataset_hash).
    """
    config = config_of(run)
    if model:
        config = check(dataclasses.replace(config, model=model))
    check_trusted(vars(config), {"model"} if model else (), trust_model, run)
    check_url(dataset or config.dataset)
    if out is None:
        other = re.sub(r"[^\w.-]", "-", Path(dataset).name)
        out = run / (f"evaluation-{split}-of-{other}" if dataset else f"evaluation-{split}")
    files.check_out(out)
    if config.device == "cuda":  # it may have been trained on another machine
        config = dataclasses.replace(config, device="auto")
    name = dataset or config.dataset
    trained_on, data = _data(run, config, name)
    samples = data.test if split == "test" else data.validation
    if not samples:
        raise UsageError(f"the data set {name} has no test images: use --split validation")
    from hvdtrain.data.identity import identity

    with importing():
        from hvdtrain.evaluate.predictions import predict  # imports torch
        from hvdtrain.models.own import code_hash
    from hvdtrain.console import count_bar
    from hvdtrain.runs.schema import Manifest, find

    manifest = find(run, Manifest)
    if manifest and manifest.image_size:  # what it was trained on, whatever the data set says by now
        config = dataclasses.replace(config, image_size=manifest.image_size)
    same = identity(data) == manifest.dataset_hash if manifest and manifest.dataset_hash else None
    weights = _weights(run, config.save)
    images = f"{len(samples)} {split} images by {weights.relative_to(run)}"
    with count_bar("evaluating") as progress:
        predictions = predict(config, weights, trained_on, samples, progress)
    facts = {"run": str(run), "weights": str(weights), "dataset": name, "split": split, "same_data": same}
    files.write(out, predictions, facts)
    if manifest and manifest.model_hash != code_hash(config.model):
        click.echo(f"note: {config.model} is not the code that {run} was trained with", err=True)
    if same is False:
        click.echo(f"note: the images of {name} are not those that {run} was trained and validated on", err=True)
    top5 = "no top-5 of so few classes" if predictions.top5 is None else f"top-5 {predictions.top5:.4f}"
    click.echo(f"{images}: loss {predictions.loss:.4f}, top-1 accuracy {predictions.top1:.4f}, {top5}")
    click.echo(f"wrote {out}: {len(predictions.mistakes)} mistakes in {files.MISTAKES}, the surest first")


def _data(run: Path, config: RunConfig, name: str) -> "tuple[ImageFolder, ImageFolder]":
    """The data set that the run was trained on, and the one that is asked for. UsageError where its classes differ."""
    from hvdtrain.data.find import find_dataset

    if is_code(name) != is_code(config.dataset):
        raise UsageError(f"{run} was trained on {config.dataset}: your own data and images are not tested by one model")
    trained_on, data = (find_dataset(each, config.skip_bad) for each in (config.dataset, name))
    if trained_on.classes != data.classes:
        known, given = ", ".join(trained_on.classes), ", ".join(data.classes)
        raise UsageError(f"the model knows the classes {known}; {name} has {given}")
    return trained_on, data


def _weights(run: Path, save: str) -> Path:
    """The weights to test: what was to be kept, or of a run that has not finished its last snapshot's."""
    from hvdtrain.rank.results import WEIGHTS as FINAL
    from hvdtrain.runs import snapshot

    final, best = run / FINAL, run / "snapshots" / snapshot.BEST
    kept = best if save == "best" else final
    is_last = save == "best" or (run / "summary.json").is_file()  # or it is of an end from which the run went on
    if not (is_last and kept.is_file()):
        if last := snapshot.latest(run, lambda line: click.echo(line, err=True)):
            return last.folder / snapshot.WEIGHTS
        kept = final if final.is_file() else best
    if not kept.is_file():
        raise UsageError(f"{run} was trained with --save {save}: there is no model to test, nor a snapshot")
    return kept
