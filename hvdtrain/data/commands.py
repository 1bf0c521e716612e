"""`hvdtrain data`: build and inspect image folders."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from hvdtrain.base.config import recipes
from hvdtrain.base.config.option_types import Folder, Real
from hvdtrain.base.errors import Failure, UsageError
from hvdtrain.base.formatting import printable_name
from hvdtrain.base.system.own_code import is_code
from hvdtrain.base.system.preempt import ended_by_signals
from hvdtrain.data.build import build
from hvdtrain.data.folder import TEST, TRAIN, VALIDATION, ImageFolder, read_manifest, scan
from hvdtrain.data.names import readable
from hvdtrain.data.recipe import Recipe
from hvdtrain.data.selection import PARTS, SPLIT_METHODS

PATH = click.Path(path_type=Path, resolve_path=True)


@click.group()
def data() -> None:
    """Build and inspect image folders.

    hvdtrain trains on folders of this shape, as they are; the parts may be called as
    datasets/README.md lists:

    \b
      FOLDER/train/<class>/<image>.png   (or jpg, jpeg, bmp, webp)
      FOLDER/val/<class>/<image>.png     (no other classes)

    `hvdtrain data build folder --source DIR --out FOLDER` makes such a folder from images that are
    in a folder for each class. `--dataset FOLDER` takes any such folder. `--dataset NAME` takes a
    built-in data set, which is built on first use and kept in your cache; HVDTRAIN_CACHE=FOLDER
    moves that.
    """


@data.command("list", short_help="List the built-in data sets.")
def list_() -> None:
    """List the built-in data sets: what `--dataset` and `hvdtrain data build` take by name."""
    from rich.table import Table

    from hvdtrain.base.console import Console
    from hvdtrain.data import synthetic

    table = Table("name", "what", "images", "licence", box=None, pad_edge=False)
    for name in recipes.names("datasets"):
        recipe = Recipe.load(name)
        table.add_row(name, recipe.title, recipe.size, recipe.licence)
    images = synthetic.TRAIN + synthetic.VALIDATION
    side = synthetic.SIDE
    size = f"{images:,} of {side}x{side}, {synthetic.CLASSES:,} classes"
    table.add_row(synthetic.NAME, "Noise, to time training alone", size, "")
    Console().print(table)


@data.command("build", short_help="Build a data set into a folder.")
@click.argument("name")
@click.option(
    "--out", required=True, type=Folder(path_type=Path), metavar="FOLDER", help="Where it goes."
)
@click.option("--archive", type=PATH, metavar="FILE", help="Take the images from this zip or tar.")
@click.option(
    "--source", type=PATH, metavar="FOLDER", help="Take the images from this folder, zip or tar."
)
@click.option("--force", is_flag=True, help="Replace what an earlier build put in FOLDER.")
@click.option(
    "--validation",
    type=Real(0, 0.9, min_open=True),
    metavar="SHARE",
    help="folder, digits: share of each class's images that goes to ValidationData.  [default: 0.2]",
)
@click.option(
    "--skip-bad",
    is_flag=True,
    default=None,
    help="folder: leave out images that cannot be decoded.",
)
@click.option("--licence", help="folder: what may be done with the images; stands in dataset.toml.")
@click.option(
    "--seed",
    type=click.IntRange(0),
    help="Decides what is drawn: classes, split, and generated images.",
)
@click.option(
    "--classes",
    metavar="WORDS",
    help="imagenet-slice: wnids or names of classes, by commas. "
    "coil100: `edible-toy-other` or `objects`.",
)
@click.option(
    "--num-classes",
    type=click.IntRange(2),
    help="imagenet-slice, imagenet20: this many classes, drawn by --seed.",
)
@click.option(
    "--train-per-class",
    type=click.IntRange(1),
    help="imagenet-slice, imagenet20, imagenette, cifar10, mnist: keep at most this many training "
    "images of a class.",
)
@click.option(
    "--val-per-class",
    type=click.IntRange(1),
    help="The same data sets: keep at most this many validation images of a class.",
)
@click.option(
    "--test-fraction",
    type=Real(0, 0.9),
    help="imagenet-slice, imagenet20, imagenette: share of the training images held out in TestData.",
)
@click.option(
    "--resize",
    type=click.IntRange(0),
    metavar="PIXELS",
    help="folder and those of ImageNet: shrink the shorter side to this many pixels; 0: keep the size.",
)
@click.option(
    "--link",
    type=click.Choice(["copy", "hard", "symlink"]),
    help="folder, coil100 and those of ImageNet: link to the images of --source instead of copying.",
)
@click.option(
    "--split",
    type=click.Choice(SPLIT_METHODS),
    help="coil100, turntable: what is held out for validation. `random` views have near "
    "duplicates, a few degrees away, among the training images, so accuracy on them flatters; "
    "`by-angle` holds out an arc of views, `by-object` whole objects.",
)
@click.option(
    "--objects", type=click.IntRange(2), help="turntable: objects, one class each.  [default: 20]"
)
@click.option(
    "--views", type=click.IntRange(2, 360), help="turntable: views of each object.  [default: 72]"
)
@click.option(
    "--noise",
    type=Real(0, 1),
    help="turntable: share of each pixel that is noise of coloured squares, different in each view.  "
    "[default: 0, of noisy-turntable 0.4]",
)
@ended_by_signals
def build_(
    name: str, out: Path, archive: Path | None, source: Path | None, force: bool, **options: Any
) -> None:
    """Build the data set NAME into a folder.

    \b
      hvdtrain data build folder --source PHOTOS --out mine  (your images, in class folders)
      hvdtrain data build digits --out digits
      hvdtrain data build coil100 --out coil                 (downloads 131 MB)
      hvdtrain data build coil100 --archive coil-100.zip --split by-object --out coil
      hvdtrain data build imagenet-slice --source imagenet100 --num-classes 20 \\
          --resize 256 --out slice
      hvdtrain data build imagenet-slice --archive ILSVRC2012_img_train.tar \\
          --classes goldfish,n02102040 --out two

    `folder` takes your images from a folder, zip or tar with a folder for each class. It decodes
    each image, counts the files that it leaves out, and names the first ones. A zip or tar is not
    unpacked. It reads Tiny ImageNet, and Kaggle's table of ImageNet's validation images.
    `imagenet-slice` takes ILSVRC2012's tars, an extracted tree, Kaggle's trees, Imagenette, or any
    folder of class folders. The folder appears complete or not at all; if it has the same data set
    already, nothing is built. Its dataset.toml has the origin and the licence of the images, and
    how they were chosen and split. Equal inputs give equal bytes.
    """
    if archive and source:
        raise UsageError("--archive and --source exclude each other: give one")
    given = {option: value for option, value in options.items() if value is not None}
    from hvdtrain.base.console import count_bar

    with count_bar(name) as progress:
        built = build(
            name, out, force=force, progress=progress, images_from=archive or source, **given
        )
    folder = scan(built)
    held_out = f", {len(folder.test):,} in {TEST}" if folder.test else ""
    click.echo(
        f"{out}: {len(folder.classes)} classes, {len(folder.train):,} images in {TRAIN}, "
        f"{len(folder.validation):,} in {VALIDATION}{held_out}"
    )
    for line in read_manifest(folder.root).get("notes", []):
        click.echo(line)


LABEL = click.option(
    "--label", default="", metavar="COLUMN", help="Parquet files: the column of classes."
)
HELD_OUT = click.option(
    "--validation",
    type=Real(0, 0.9),
    default=0.0,
    metavar="SHARE",
    help="Parquet files: share of each class's training images to validate on, where there is no "
    "part for that.",
)


def _images(dataset: str, label: str, validation: float) -> ImageFolder:
    """Lists a data set of images by its name, folder or URL. Raises UsageError for own data."""
    from hvdtrain.data.find import find_dataset, is_name

    if is_code(dataset):
        raise UsageError(
            f"{dataset} is your own code: this command reads only image folders and Parquet files"
        )
    if not Path(dataset).is_dir() or Path(dataset).is_absolute():
        return find_dataset(dataset, label=label, validation=validation)
    # Here a folder takes precedence over a recipe of the same name.
    images = find_dataset(f".{os.sep}{dataset}", label=label, validation=validation)
    if not is_name(dataset):
        return images
    note = (
        f"{dataset} is the folder here, and not the built-in data set of that name, which `train "
        f"--dataset {dataset}` takes"
    )
    return replace(images, notes=(note, *images.notes))


def _tell_notes(images: ImageFolder) -> None:
    for line in images.notes:
        click.echo(f"note: {line}", err=True)


@data.command("check", short_help="Decode and hash every image.")
@click.argument("dataset", metavar="FOLDER")
@LABEL
@HELD_OUT
@ended_by_signals
def check_(dataset: str, label: str, validation: float) -> None:
    """Decode and hash every image of FOLDER (or of a data set's name, or of Parquet files' URL).

    Prints the number of images of each class, and the files in the folders that are not used. Exit
    code 1 if an image cannot be decoded, if the same image is in two parts, or if a folder of `data
    build` no longer has the images that it was built with.
    """
    from rich.table import Table

    from hvdtrain.base.console import Console, count_bar
    from hvdtrain.data.check import check

    images = _images(dataset, label, validation)
    with count_bar("checking") as progress:
        counts, problems, notes = check(images, progress)
    parts = [part for part in PARTS if getattr(images, part)]
    table = Table("class", *parts, box=None, pad_edge=False)
    for name, of_class in counts.items():
        table.add_row(printable_name(readable(name)), *(f"{of_class[part]:,}" for part in parts))
    table.add_row("all", *(f"{len(getattr(images, part)):,}" for part in parts))
    Console().print(table)
    for line in notes:
        click.echo(f"note: {line}")
    for line in problems:
        click.echo(f"WRONG: {line}")
    if problems:
        raise Failure(f"{dataset}: {len(problems)} problem(s)")
    click.echo("every image can be decoded, and is in one part only")


@data.command("show", short_help="Draw a contact sheet.")
@click.argument("dataset", metavar="FOLDER")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default="sheet.png",
    show_default=True,
    help="A new PNG file.",
)
@click.option(
    "--images",
    "-k",
    type=click.IntRange(2, 20),
    default=8,
    show_default=True,
    help="Images of each class.",
)
@LABEL
@HELD_OUT
@ended_by_signals
def show_(dataset: str, out: Path, images: int, label: str, validation: float) -> None:
    """Draw a contact sheet of FOLDER: images of each class, and what `--augment` does to the first.

    \b
      hvdtrain data show digits --out digits.png
    """
    if out.exists() or not out.parent.is_dir():
        raise UsageError(f"--out {out}: name a new file, in a folder that exists")
    folder = _images(dataset, label, validation)
    _tell_notes(folder)
    from hvdtrain.data.contact_sheet import draw

    draw(folder, images, out)
    click.echo(f"wrote {out}")


@data.command("pack", short_help="Pack a data set into Parquet files.")
@click.argument("dataset", metavar="SET")
@click.argument("url", metavar="FOLDER|URL")
@click.option(
    "--shard-mb",
    type=click.IntRange(1, 4096),
    default=128,
    show_default=True,
    help="Size of a file, in MiB, approximately.",
)
@click.option("--force", is_flag=True, help="Replace what is packed there.")
@LABEL
@HELD_OUT
@ended_by_signals
def pack_(
    dataset: str, url: str, shard_mb: int, force: bool, label: str, validation: float
) -> None:
    """Pack SET, a data set's name, folder or URL, into Parquet files, as Hugging Face writes them.

    \b
      hvdtrain data pack coil s3://bucket/coil
      hvdtrain train --dataset s3://bucket/coil
      hvdtrain train --dataset simplecache::s3://bucket/coil    (whole files are kept in your cache)

    The files go to a folder, or to any URL that fsspec writes to: s3://… (with s3fs installed),
    gs://… (gcsfs), hf://… (huggingface_hub), and more. `datasets.load_dataset` and the Hub read
    them too. A job trains on the same samples in the same order as from SET, and a report takes
    both for the same data set. Images of all classes are mixed. `train --shuffle-block N`, where N
    is the number of images in a row group, reads few row groups at a time, and gives the same order
    from SET.
    """
    from hvdtrain.base.console import count_bar
    from hvdtrain.data.packing import pack

    images = _images(dataset, label, validation)
    _tell_notes(images)
    with count_bar("packing") as progress:
        rows = pack(images, url.rstrip("/"), shard_mb * 2**20, force, progress)
    click.echo(f"{url} holds {dataset}")
    if rows < len(images.train):
        click.echo(
            f"{rows} images a row group: `train --shuffle-block {rows}` reads few of them at a time"
        )
