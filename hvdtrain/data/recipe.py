"""Recipes in `datasets/`, and requests to build one with certain options."""

import hashlib
import json
import math
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

from msgspec import ValidationError, convert

from hvdtrain.config import recipes
from hvdtrain.config.untrusted import parse_toml
from hvdtrain.data.selection import SPLIT_METHODS
from hvdtrain.errors import UsageError, unknown

SOURCES = Path(__file__).parent / "sources"
FORMAT = 2  # of dataset.toml: what earlier versions have built in the cache is built anew
KINDS = sorted(path.stem for path in SOURCES.glob("[a-z]*.py"))


@dataclass(frozen=True)
class Recipe:
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
    origin: dict[str, Any] = field(default_factory=dict)
    files: dict[str, Any] = field(default_factory=dict)
    classes: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def load(cls, name: str) -> "Recipe":
        """Read a recipe.

        Raises:
            UsageError: the name is unknown (the known ones are listed), or the recipe has missing or unknown keys, or
                values of another kind.
        """
        table = recipes.load("datasets", name)
        known = {f.name for f in fields(cls)} - {"name"}
        required = {f.name for f in fields(cls) if f.default_factory is MISSING} - {"name"}
        if wrong := sorted((required - table.keys()) | (table.keys() - known)):
            raise UsageError(f"datasets/{name}.toml: missing or unknown: {', '.join(wrong)}; see datasets/README.md")
        try:
            recipe = convert({"name": name} | table, cls)
        except ValidationError as error:
            raise UsageError(f"datasets/{name}.toml: {error}") from None
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
        if chosen.get("split", "random") not in SPLIT_METHODS:
            raise unknown("split", chosen["split"], SPLIT_METHODS)
        if chosen.get("link", "copy") != "copy" and chosen.get("resize"):
            raise UsageError(
                f"--link {chosen['link']} keeps images as they are: it does not go with --resize {chosen['resize']}; "
                "use --resize 0"
            )
        for option, value in chosen.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise UsageError(f"{option} {value} is not a finite number")
        return BuildRequest(self, chosen | self._classes(chosen))

    def _classes(self, chosen: dict[str, Any]) -> dict[str, Any]:
        """The options about classes, with what their files hold in place of the files' names: the request's key depends
        on that.
        """
        classes: Any = chosen.get("classes")
        if file := chosen.get("classes_file"):
            if classes:
                raise UsageError("--classes and --classes-file exclude each other: give one")
            classes = ",".join(_read_class_names(Path(file)))
        if classes and chosen.get("num_classes") != self.options.get("num_classes"):
            raise UsageError("--classes and --num-classes exclude each other: give one")
        if self.classes and classes not in self.classes:
            classes = _read_grouping(classes, list(self.classes))
        return {name: value for name, value in (("classes", classes), ("classes_file", "")) if name in chosen}


@dataclass(frozen=True)
class BuildRequest:
    """A recipe with a value for every option: equal requests, of equal images, give equal bytes."""

    recipe: Recipe
    options: dict[str, Any]

    @property
    def key(self) -> str:
        """A hash of the recipe's contents and the options, 64 hex digits."""
        contents = json.dumps([FORMAT, vars(self.recipe), self.options], sort_keys=True)
        return hashlib.sha256(contents.encode()).hexdigest()

    @property
    def validation(self) -> float:
        """The share of each class that is held out, where the source has no such part itself."""
        return self.options.get("validation", self.recipe.validation)

    @property
    def grouping(self) -> dict[str, Any] | None:
        """Which labels make a class, as selection.by_class takes it."""
        classes = self.options.get("classes")
        return self.recipe.classes[classes] if self.recipe.classes and isinstance(classes, str) else (
            classes if isinstance(classes, dict) else None
        )  # fmt: skip

    @property
    def wanted_classes(self) -> list[str]:
        """The classes that are requested by name; empty for all."""
        classes = "" if self.recipe.classes else self.options.get("classes", "")
        return [name for name in classes.split(",") if name.strip()]


def _read_class_names(file: Path) -> list[str]:
    """The classes in a file, one a line; comments (#) are ignored."""
    try:
        lines = [line.partition("#")[0].strip() for line in file.read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise UsageError(f"--classes-file {file} cannot be read: {getattr(error, 'strerror', error)}") from None
    if not any(lines):
        raise UsageError(f"--classes-file {file} names no class")
    return [line for line in lines if line]


def _read_grouping(classes: str, known: list[str]) -> dict[str, Any]:
    """The classes in a user's own TOML file, each with its labels."""
    if not Path(classes).is_file():
        raise UsageError(f"{unknown('--classes', classes, known)}, or give a TOML file: name = [labels] a line")
    try:
        return parse_toml(Path(classes).read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"--classes {classes} cannot be read: {error}") from None
