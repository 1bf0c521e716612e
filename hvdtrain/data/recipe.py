"""Recipes in `datasets/`, and requests to build one with certain options."""

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import Struct, ValidationError, convert, structs

from hvdtrain.config import recipes
from hvdtrain.config.untrusted import read_whole
from hvdtrain.errors import UsageError, unknown

SOURCES = Path(__file__).parent / "sources"
FORMAT = 2  # of dataset.toml: what earlier versions have built in the cache is built anew
KINDS = sorted(path.stem for path in SOURCES.glob("[a-z]*.py"))


class Recipe(Struct, frozen=True, forbid_unknown_fields=True):
    """`datasets/NAME.toml`; datasets/README.md says what each key means."""

    name: str
    title: str
    size: str
    source: str
    licence: str
    citation: str
    revision: int
    seed: int
    validation: float
    note: str
    options: dict[str, Any]
    origin: dict[str, Any] = {}
    files: dict[str, Any] = {}
    classes: dict[str, dict[str, Any]] = {}

    @classmethod
    def load(cls, name: str) -> "Recipe":
        """Read a recipe.

        Raises:
            UsageError: the name is unknown (the known ones are listed), or the recipe has missing or unknown keys, or
                values of another kind.
        """
        table = recipes.load("datasets", name)
        try:
            recipe = convert({"name": name} | table, cls)
        except ValidationError as error:
            raise UsageError(f"datasets/{name}.toml: {error}; see datasets/README.md") from None
        if recipe.source not in KINDS:
            raise unknown(f"source in datasets/{name}.toml", recipe.source, KINDS)
        return recipe

    def request(self, **options: Any) -> "BuildRequest":
        """A request to build this recipe with these values of `seed` and of its options.

        Raises:
            UsageError: the recipe has no such option, a value is out of range, or a file of classes cannot be read.
        """
        defaults = {"seed": self.seed, **self.options}
        for option in options:
            if option not in defaults:
                raise UsageError(f"data set '{self.name}' has no option '{option}': it takes {', '.join(defaults)}")
        chosen = defaults | options
        if chosen.get("link", "copy") != "copy" and chosen.get("resize"):
            raise UsageError(
                f"--link {chosen['link']} keeps images as they are: it does not go with --resize {chosen['resize']}; "
                "use --resize 0"
            )
        for option, value in chosen.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise UsageError(f"{option} {value} is not a finite number")
        if file := chosen.get("classes_file"):
            if chosen["classes"]:
                raise UsageError("--classes and --classes-file exclude each other: give one")
            chosen |= {"classes": _read_class_names(Path(file)), "classes_file": ""}  # the key has what the file says
        if self.classes and chosen["classes"] not in self.classes:
            raise unknown("--classes", chosen["classes"], list(self.classes))
        if chosen.get("classes") and chosen.get("num_classes") != self.options.get("num_classes"):
            raise UsageError("--classes and --num-classes exclude each other: give one")
        return BuildRequest(self, chosen)


@dataclass(frozen=True)
class BuildRequest:
    """A recipe with a value for every option: equal requests, of equal images, give equal bytes."""

    recipe: Recipe
    options: dict[str, Any]

    @property
    def key(self) -> str:
        """A hash of the recipe's contents and the options, 64 hex digits."""
        contents = json.dumps([FORMAT, structs.asdict(self.recipe), self.options], sort_keys=True)
        return hashlib.sha256(contents.encode()).hexdigest()

    @property
    def validation(self) -> float:
        """The share of each class that is held out, where the source has no such part itself."""
        return self.options.get("validation", self.recipe.validation)

    @property
    def grouping(self) -> dict[str, Any] | None:
        """Which labels make a class, as selection.by_class takes it."""
        return self.recipe.classes.get(self.options.get("classes", ""))


def _read_class_names(file: Path) -> str:
    """The classes in a file, one a line, with commas between them; what comes after # is a comment."""
    try:
        lines = [line.partition("#")[0].strip() for line in read_whole(file).decode().splitlines()]
    except (OSError, ValueError) as error:
        raise UsageError(f"--classes-file {file} cannot be read: {getattr(error, 'strerror', error)}") from None
    if not any(lines):
        raise UsageError(f"--classes-file {file} names no class")
    return ",".join(line for line in lines if line)
