"""Filling a recipe's templates with the values of a job.

A template is the words of a command, a shell script, or data. A placeholder is `{name}`, or
`{name:number}` for a number in data; `${NAME}` is left to the shell, and to YARN. A missing value
is an empty string.
"""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from hvdtrain.base.config.untrusted import control_character
from hvdtrain.base.errors import UsageError

Value = str | int | list[str]
_PLACEHOLDER = re.compile(r"(?<!\$)\{([a-z_]+)(:number)?\}")
# Characters that a value in a line such as `#SBATCH …` may not have, since each scheduler reads
# them differently.
_SPECIAL = re.compile(r"[\n\"'\\$`]")


class Filler:
    """Fills templates of one recipe with the values of one job.

    Args:
        recipe: the recipe's file, for messages.
        values: the values by placeholder. A list of words within text is quoted for a shell.
        doubled: characters of values that are written twice in a resource, because its reader takes
            a single one for the beginning of a variable.

    Raises:
        UsageError: from every method, if there is no value for a placeholder; from `script` and
            `resource`, if a value has a control character, which could begin a new line in a file
            that a scheduler reads.
    """

    def __init__(self, recipe: str, values: Mapping[str, Value], doubled: str = "") -> None:
        self.recipe = recipe
        self.values = values
        self.doubled = {ord(char): 2 * char for char in doubled}

    def command(self, template: Sequence[Any]) -> list[str]:
        """Returns the words of a command.

        Words in a list within the template, such as ["--network-interfaces", "{interface}"], are
        left out together if a value in one of them is missing.
        """
        words: list[str] = []
        for part in self._data(template):
            if isinstance(part, list):
                words += part
            else:
                words.append(part)
        return words

    def script(self, template: str) -> str:
        """Returns a shell script, in which values are quoted for the shell.

        Lines in which a value is missing are left out.

        Raises:
            UsageError: a line that begins with # has a value that would need quoting.
        """
        self._check_lines()
        lines = []
        for line in template.splitlines():
            if not self._lacks_value(line):
                lines.append(self._text(line, "comment" if line.startswith("#") else "shell"))
        return "\n".join(lines) + "\n"

    def resource(self, template: Any) -> str:
        """Returns data for a file, as JSON, which is also YAML.

        A text that is one placeholder becomes the value: a text, a list, or with `:number` a
        number. Entries of a table or list that lack a value are left out; from a list of tables,
        the whole table is.
        """
        self._check_lines()
        values = {name: self._with_doubled(value) for name, value in self.values.items()}
        return json.dumps(Filler(self.recipe, values)._data(template), indent=2) + "\n"

    def _check_lines(self) -> None:
        for name, value in self.values.items():
            words = value if isinstance(value, list) else [str(value)]
            for word in words:
                if control_character(word):
                    raise UsageError(
                        f"{self.recipe}: {{{name}}} would be {word!a}, which has a control "
                        "character"
                    )

    def _with_doubled(self, value: Value) -> Value:
        if isinstance(value, list):
            return [word.translate(self.doubled) for word in value]
        return value.translate(self.doubled) if isinstance(value, str) else value

    def _data(self, template: Any) -> Any:
        """Returns the template, whichever type it has, filled in."""
        if isinstance(template, str):
            match = _PLACEHOLDER.fullmatch(template)
            if match:
                value = self._value(match)
                is_number = bool(match[2])
                if is_number or isinstance(value, list):
                    return value
            return self._text(template)
        if isinstance(template, list):
            return [self._data(inner) for inner in template if not self._lacks_value(inner)]
        if isinstance(template, dict):
            return {
                key: self._data(inner)
                for key, inner in template.items()
                if not self._lacks_value([inner])
            }
        return template

    def _lacks_value(self, template: Any) -> bool:
        """Returns whether a value is missing in a text, or in a text of a list or table."""
        if isinstance(template, dict):
            parts = list(template.values())
        elif isinstance(template, list):
            parts = template
        else:
            parts = [template]
        for part in parts:
            if not isinstance(part, str):
                continue
            names = [name for name, _ in _PLACEHOLDER.findall(part)]
            if any(self.values.get(name) == "" for name in names):
                return True
        return False

    def _value(self, match: re.Match[str]) -> Value:
        if match[1] not in self.values:
            known = ", ".join(self.values)
            raise UsageError(
                f"{self.recipe}: there is no {match[0]} to fill in: choose from {known}"
            )
        return self.values[match[1]]

    def _text(self, text: str, within: str = "") -> str:
        """Returns the text, filled in.

        Args:
            within: `shell` quotes values; `comment` refuses values that would need quotes.
        """

        def fill(match: re.Match[str]) -> str:
            value = self._value(match)
            if isinstance(value, list):
                return shlex.join(value)
            if within == "comment" and _SPECIAL.search(str(value)):
                raise UsageError(
                    f"{value!a} cannot stand in the line `{text}`: choose a name without quotes, $ "
                    "and \\"
                )
            if within == "shell" and isinstance(value, str):
                return shlex.quote(value)
            return str(value)

        return _PLACEHOLDER.sub(fill, text)
