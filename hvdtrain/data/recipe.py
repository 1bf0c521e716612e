"""Recipes in `datasets/`, with their default options or the options of a request."""

import hashlib
import json
import math
from pathlib import Path
from typing import Any

from msgspec import Struct, ValidationError, convert, structs

from hvdtrain.base.config import recipes
from hvdtrain.base.errors import UsageError, unknown

SOURCES = Path(__file__).parent / "sources"
FORMAT = 3  # of dataset.toml. Folders of other formats in the cache are built anew.
KINDS = sorted(path.stem for path in SOURCES.glob("[a-z]*.py"))


class Recipe(Struct, frozen=True, forbid_unknown_fields=True):
    """The content of `datasets/NAME.toml`; datasets/README.md describes the keys."""

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
        """Reads a recipe.

        Raises:
            UsageError: There is no such recipe (the message lists all), or it has missing or
                unknown keys, or values of other types.
        """
        table = recipes.load("datasets", name)
        try:
            recipe = convert({"name": name} | table, cls)
        except ValidationError as error:
            raise UsageError(f"datasets/{name}.toml: {error}; see datasets/README.md") from None
        if recipe.source not in KINDS:
            raise unknown(f"source in datasets/{name}.toml", recipe.source, KINDS)
        return recipe

    def request(self, **options: Any) -> "Recipe":
        """Returns the recipe with the options of a request, `seed` among them.

        Equal requests of equal images give equal bytes.

        Raises:
            UsageError: The recipe has no such option, or a value is out of range.
        """
        defaults = {"seed": self.seed, **self.options}
        for option, value in options.items():
            if option not in defaults:
                raise UsageError(
                    f"data set '{self.name}' has no option '{option}': "
                    f"it takes {', '.join(defaults)}"
                )
            if isinstance(value, float) and not math.isfinite(value):
                raise UsageError(f"{option} {value} is not a finite number")
        chosen = {"split": self.files.get("split", "random")} | defaults | options
        if chosen.get("link", "copy") != "copy" and chosen.get("resize"):
            raise UsageError(
                f"--link {chosen['link']} does not go with --resize {chosen['resize']}: "
                "use --resize 0"
            )
        if self.classes and chosen["classes"] not in self.classes:
            raise unknown("--classes", chosen["classes"], list(self.classes))
        if chosen.get("classes") and chosen.get("num_classes") != self.options.get("num_classes"):
            raise UsageError("--classes and --num-classes exclude each other: give one")
        validation = chosen.get("validation", self.validation)
        return structs.replace(self, options=chosen, validation=validation)

    @property
    def key(self) -> str:
        """A hash of the whole recipe, in 64 hex digits."""
        contents = json.dumps([FORMAT, structs.asdict(self)], sort_keys=True)
        return hashlib.sha256(contents.encode()).hexdigest()
