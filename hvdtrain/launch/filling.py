"""Fills a recipe's templates with the values of a job: the words of a command, a shell script, or data to be dumped.

A placeholder is `{name}`, or `{name:number}` for a number in data; `${NAME}` is the shell's, and YARN's. What is
missing is an empty string.
"""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from hvdtrain.errors import UsageError

Value = str | int | list[str]
_PLACEHOLDER = re.compile(r"(?<!\$)\{([a-z_]+)(:number)?\}")
# What a value in a line such as `#SBATCH …` must do without: each scheduler reads these in its own way.
_SPECIAL = re.compile(r"[\n\"'\\$`]")


class Filler:
    """The values of one job for one recipe.

    Args:
        recipe: its file, for messages.
        values: by placeholder. A list of words is quoted for a shell where it stands within text.

    Each method raises UsageError for a placeholder that there is not.
    """

    def __init__(self, recipe: str, values: Mapping[str, Value]) -> None:
        self.recipe, self.values = recipe, values

    def command(self, template: Sequence[Any]) -> list[str]:
        """The words of a command. Those in a list within it, such as ["--network-interfaces", "{interface}"], are left
        out together where a value in one of them is missing.
        """
        parts = self._data(template)
        return [word for part in parts for word in (part if isinstance(part, list) else [part])]

    def script(self, template: str) -> str:
        """A shell script: values are quoted for the shell. Lines in which one is missing are left out.

        UsageError where a line that begins with # has a value that would need quoting.
        """
        lines = []
        for line in template.splitlines():
            if not self._lacks(line):
                lines.append(self._text(line, "comment" if line.startswith("#") else "shell"))
        return "\n".join(lines) + "\n"

    def resource(self, template: Any) -> str:
        """Data for a file, as JSON, which YAML has in it.

        A text that is one placeholder becomes its value: a text, a list, or with `:number` a number. What lacks a value
        is left out: an entry of a table or list, and in a list of tables the whole table.
        """
        return json.dumps(self._data(template), indent=2) + "\n"

    def _data(self, template: Any) -> Any:
        if isinstance(template, str):
            match = _PLACEHOLDER.fullmatch(template)
            value = self._value(match) if match else ""
            return value if match and (match[2] or isinstance(value, list)) else self._text(template)
        if isinstance(template, list):
            return [self._data(inner) for inner in template if not self._lacks(inner)]
        if isinstance(template, dict):
            return {key: self._data(inner) for key, inner in template.items() if not self._lacks([inner])}
        return template

    def _lacks(self, template: Any) -> bool:
        """Whether a value is missing in a text, or in one that stands directly in a list or table."""
        parts = list(template.values()) if isinstance(template, dict) else template
        texts = [part for part in (parts if isinstance(parts, list) else [parts]) if isinstance(part, str)]
        return any(self.values.get(name) == "" for text in texts for name, _ in _PLACEHOLDER.findall(text))

    def _value(self, match: re.Match[str]) -> Value:
        if match[1] not in self.values:
            known = ", ".join(self.values)
            raise UsageError(f"{self.recipe}: there is no {match[0]} to fill in: choose from {known}")
        return self.values[match[1]]

    def _text(self, text: str, within: str = "") -> str:
        """The text, filled in.

        Args:
            within: `shell` quotes values; `comment` refuses those that would need it.
        """

        def fill(match: re.Match[str]) -> str:
            value = self._value(match)
            if isinstance(value, list):
                return shlex.join(value)
            if within == "comment" and _SPECIAL.search(str(value)):
                raise UsageError(f"{value!a} cannot stand in the line `{text}`: choose a name without quotes, $ and \\")
            return shlex.quote(value) if within == "shell" and isinstance(value, str) else str(value)

        return _PLACEHOLDER.sub(fill, text)
