"""`hvdtrain data`: build and inspect image folders."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from hvdtrain import recipes
from hvdtrain.data.build import Progress, build, is_built
from hvdtrain.data.folder import TRAIN, VALIDATION, scan
from hvdtrain.data.recipe import Recipe


@click.group()
def data() -> None:
    """Build and inspect image folders.

    hvdtrain trains on folders of this shape, the one that torchvision's ImageFolder reads twice:

    \b
      FOLDER/TrainData/<class>/<image>.png       (or jpg, jpeg, bmp, webp)
      FOLDER/ValidationData/<class>/<image>.png  (the same classes)

    `--dataset FOLDER` takes any such folder. `--dataset NAME` takes a built-in data set, which is built on first use
    and kept in your cache; HVDTRAIN_CACHE=FOLDER moves that.
    """


@data.command("list")
def list_() -> None:
    """List the built-in data sets: what `--dataset` and `hvdtrain data build` take by name."""
    from rich.console import Console
    from rich.table import Table

    table = Table("name", "what", "images", "licence", box=None, pad_edge=False)
    for name in recipes.names("datasets"):
        recipe = Recipe.load(name)
        table.add_row(name, recipe.title, recipe.size, recipe.licence)
    Console().print(table)


@data.command("build")
@click.argument("name")
@click.option(
    "--out",
    required=True,
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Where it goes; made if missing.",
)
@click.option("--force", is_flag=True, help="Build again, in place of what an earlier build put in FOLDER.")
@click.option("--seed", type=click.IntRange(0), help="Decides what is drawn: the split, and generated images.")
@click.option("--objects", type=int, help="turntable: number of objects, one class each.  [default: 20]")
@click.option("--views", type=int, help="turntable: views of each object, evenly around it.  [default: 72]")
@click.option("--flat", is_flag=True, default=None, help="turntable: one folder, no split, like COIL-100's archive.")
def build_(name: str, out: Path, force: bool, **options: Any) -> None:
    """Build the data set NAME into a folder of your own.

    \b
      hvdtrain data build digits --out digits
      hvdtrain data build turntable --objects 100 --out turntable
      hvdtrain train --dataset ./turntable

    The folder appears complete or not at all; building it again is no work. Its dataset.toml says where the images
    come from, under which licence, and how they were split. Equal options give equal bytes.
    """
    given = {option: value for option, value in options.items() if value is not None}
    if not force and is_built(Recipe.load(name).choose(**given), out.expanduser()):
        click.echo(f"{out} already holds this data set; nothing to do (--force builds it again)")
        return
    with _progress(name) as progress:
        build(name, out, force=force, progress=progress, **given)
    if given.get("flat"):
        click.echo(f"{out}: one flat folder")
        return
    folder = scan(out.expanduser())
    click.echo(
        f"{out}: {len(folder.classes)} classes, {len(folder.train):,} images in {TRAIN}, "
        f"{len(folder.validation):,} in {VALIDATION}"
    )


@contextmanager
def _progress(what: str) -> Iterator[Progress]:
    """A bar on a terminal, a line for each quarter elsewhere."""
    from rich.console import Console

    from hvdtrain.progress import bar

    console = Console(stderr=True)
    if console.is_terminal:
        with bar(console) as shown:
            task = shown.add_task(what, total=None)
            yield lambda done, total: shown.update(task, completed=done, total=total)
        return

    def line(done: int, total: int) -> None:
        if done * 4 // total > (done - 1) * 4 // total:
            click.echo(f"{what}: {done:,} of {total:,} images", err=True)

    yield line
