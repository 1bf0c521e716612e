"""`hvdtrain evaluate`: a run's saved model on the validation images, of its own data set or of another."""

from pathlib import Path

import click

from hvdtrain.config import run_config
from hvdtrain.errors import UsageError


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--dataset", default="", help="Another data set's name or folder, with the same classes.")
def evaluate(run: Path, dataset: str) -> None:
    """Test the model that a run saved: loss and accuracy over every validation image.

    \b
    hvdtrain evaluate runs/single
    hvdtrain evaluate runs/single --dataset FOLDER
    """
    config = run_config(run)
    from hvdtrain.data.find import find

    own, data = find(config.dataset), find(dataset or config.dataset)
    if own.classes != data.classes:
        known, given = ", ".join(own.classes), ", ".join(data.classes)
        raise UsageError(f"the model knows the classes {known}; {dataset} has {given}")
    from hvdtrain.work import test

    loss, accuracy = test(run, config, own, data)
    click.echo(f"{len(data.validation)} images: loss {loss:.4f}, accuracy {accuracy:.4f}")
