"""What a recipe in `datasets/` says, and a request to build it with every option decided."""

import hashlib
import json
import math
import tomllib
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

from hvdtrain import recipes
from hvdtrain.data.select import SPLITS
from hvdtrain.errors import UsageError, unknown

SOURCES = Path(__file__).parent / "sources"
KINDS = sorted(path.stem for path in SOURCES.glob("[a-z]*.py") if path.stem != "solids")


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
        """UsageError for an unknown name (the known ones are listed) or a recipe with missing or unknown keys."""
        written = recipes.load("datasets", name)
        known = {f.name for f in fields(cls)} - {"name"}
        needed = {f.name for f in fields(cls) if f.default_factory is MISSING} - {"name"}
        if wrong := sorted((needed - written.keys()) | (written.keys() - known)):
            raise UsageError(f"datasets/{name}.toml: missing or unknown: {', '.join(wrong)}; see datasets/README.md")
        recipe = cls(name=name, **written)
        if recipe.source not in KINDS:
            raise unknown(f"source in datasets/{name}.toml", recipe.source, KINDS)
        return recipe

    def choose(self, **options: Any) -> "Order":
        """This recipe with some of `seed` and its options set.

        Raises:
            UsageError: an option that it does not have, a value out of range, or a file of classes that is none.
        """
        valid = {"seed": self.seed, **self.options}
        for option in options:
            if option not in valid:
                raise UsageError(f"data set '{self.name}' has no option '{option}': it takes {', '.join(valid)}")
        chosen = valid | options
        if chosen.get("split", "random") not in SPLITS:
            raise unknown("split", chosen["split"], SPLITS)
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
            chosen["classes"] = ",".join(_lines(Path(file)))
            chosen["classes_file"] = ""  # what it says decides, not what it is called
        if chosen.get("classes") and chosen.get("num_classes") != self.options.get("num_classes"):
            raise UsageError("--classes and --num-classes exclude each other: give one")
        if self.classes and chosen["classes"] not in self.classes:
            chosen["classes"] = _grouping(chosen["classes"], list(self.classes))
        return Order(self, chosen)


@dataclass(frozen=True)
class Order:
    """A recipe with every option decided: equal orders of equal images give equal bytes."""

    recipe: Recipe
    options: dict[str, Any]

    @property
    def key(self) -> str:
        """64 hex digits that stand for the recipe's contents and the options."""
        return hashlib.sha256(json.dumps([vars(self.recipe), self.options], sort_keys=True).encode()).hexdigest()

    @property
    def grouping(self) -> dict[str, Any] | None:
        """Which labels make a class, as select.by_class takes it."""
        classes = self.options.get("classes")
        return self.recipe.classes[classes] if self.recipe.classes and isinstance(classes, str) else (
            classes if isinstance(classes, dict) else None
        )  # fmt: skip

    @property
    def wanted(self) -> list[str]:
        """The classes that were asked for by name; empty for all."""
        classes = "" if self.recipe.classes else self.options.get("classes", "")
        return [name for name in classes.split(",") if name.strip()]


def _lines(file: Path) -> list[str]:
    """A class a line; what follows a # is passed over."""
    try:
        lines = [line.partition("#")[0].strip() for line in file.read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise UsageError(f"--classes-file {file} cannot be read: {getattr(error, 'strerror', error)}") from None
    if not any(lines):
        raise UsageError(f"--classes-file {file} names no class")
    return [line for line in lines if line]


def _grouping(classes: str, known: list[str]) -> dict[str, Any]:
    """The classes in a user's own TOML file."""
    if not Path(classes).is_file():
        raise UsageError(f"{unknown('--classes', classes, known)}, or give a TOML file: name = [labels] a line")
    try:
        return tomllib.loads(Path(classes).read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"--classes {classes} cannot be read: {error}") from None
