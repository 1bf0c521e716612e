"""What a recipe in `datasets/` says, and a request to build it with every option decided.

A recipe's `source` names a module beside this one with two functions:
    count(**options) -> int                 how many images there will be; UsageError for options out of range
    images(seed, **options) -> iterator of (class name, file name, encoded image)
"""

import hashlib
import json
from dataclasses import dataclass, fields
from typing import Any

from hvdtrain import recipes
from hvdtrain.errors import UsageError, unknown

SOURCES = ["digits", "turntable"]
MAKER = "hvdtrain data build"  # signs the folders that may be replaced


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

    @classmethod
    def load(cls, name: str) -> "Recipe":
        """UsageError for an unknown name (the known ones are listed) or a recipe with missing or unknown keys."""
        written = recipes.load("datasets", name)
        keys = {field.name for field in fields(cls)} - {"name"}
        if wrong := sorted(keys ^ written.keys()):
            raise UsageError(f"datasets/{name}.toml: missing or unknown: {', '.join(wrong)}; see datasets/README.md")
        recipe = cls(name=name, **written)
        if recipe.source not in SOURCES:
            raise unknown(f"source in datasets/{name}.toml", recipe.source, SOURCES)
        return recipe

    def choose(self, **options: Any) -> "Order":
        """This recipe with some of `seed` and its options set. UsageError for an option that it does not have."""
        valid = {"seed": self.seed, **self.options}
        for option in options:
            if option not in valid:
                raise UsageError(f"data set '{self.name}' has no option '{option}': it takes {', '.join(valid)}")
        return Order(self, valid | options)


@dataclass(frozen=True)
class Order:
    """A recipe with every option decided: equal orders give equal bytes."""

    recipe: Recipe
    options: dict[str, Any]

    @property
    def key(self) -> str:
        """64 hex digits that stand for the recipe's contents and the options."""
        return hashlib.sha256(json.dumps([vars(self.recipe), self.options], sort_keys=True).encode()).hexdigest()

    def manifest(self, classes: dict[str, dict[str, int]]) -> dict[str, Any]:
        """What `dataset.toml` says, with {class: {part: images}}."""
        recipe, percent = self.recipe, round(100 * self.recipe.validation)
        split = f"{100 - percent} % training, {percent} % validation, drawn at random within each class"
        return {
            "made_by": MAKER,
            "key": self.key,
            "name": recipe.name,
            "title": recipe.title,
            "source": recipe.source,
            "licence": recipe.licence,
            "citation": recipe.citation,
            "split": "none: one flat folder" if self.options.get("flat") else f"{split}. {recipe.note}".strip(),
            "images": sum(sum(parts.values()) for parts in classes.values()),
            "seed": self.options["seed"],
            "options": {name: value for name, value in self.options.items() if name != "seed"},
            "classes": classes,
        }
