"""Recipes in `datasets/`, with default options or those of a request."""

import hashlib
import json
import math
from pathlib import Path
from typing import Any

from msgspec import Struct, ValidationError, convert, structs

from hvdtrain.config import recipes
from hvdtrain.errors import UsageError, unknown

SOURCES = Path(__file__).parent / "sources"
FORMAT = 3  # of dataset.toml: what earlier versions have built in the cache is built anew
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

    def request(self, **options: Any) -> "Recipe":
        """The same with these values of `seed` and of its options: equal ones, of equal images, give equal bytes.

        Raises:
            UsageError: the recipe has no such option, or a value is out of range.
        """
        defaults = {"seed": self.seed, **self.options}
        for option, value in options.items():
            if option not in defaults:
                raise UsageError(f"data set '{self.name}' has no option '{option}': it takes {', '.join(defaults)}")
            if isinstance(value, float) and not math.isfinite(value):
                raise UsageError(f"{option} {value} is not a finite number")
        chosen = {"split": self.files.get("split", "random")} | defaults | options
        if chosen.get("link", "copy") != "copy" and chosen.get("resize"):
            raise UsageError(f"--link {chosen['link']} does not go with --resize {chosen['resize']}: use --resize 0")
        if self.classes and chosen["classes"] not in self.classes:
            raise unknown("--classes", chosen["classes"], list(self.classes))
        if chosen.get("classes") and chosen.get("num_classes") != self.options.get("num_classes"):
            raise UsageError("--classes and --num-classes exclude each other: give one")
        return structs.replace(self, options=chosen, validation=chosen.get("validation", self.validation))

    @property
    def key(self) -> str:
        """A hash of all that is in it, 64 hex digits."""
        contents = json.dumps([FORMAT, structs.asdict(self)], sort_keys=True)
        return hashlib.sha256(contents.encode()).hexdigest()
