"""Writes hvdtrain/API.md from the types and docstrings of what a Python program may use.

    python tests/api_page.py

tests/test_api_page.py compares the page with the code. griffe reads the code without importing it.
"""

from pathlib import Path

import click
import griffe

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "hvdtrain" / "API.md"

INTRODUCTION = """\
# hvdtrain from Python

This page lists the functions and types that a Python program can use: a notebook, a program that compares, or a
[training script](job/script/README.md). For example:

    import hvdtrain as hv
    print(hv.compare(modes=["allreduce", "ps-sync"], steps=50, out="runs/from-python").answer)

[Comparing](comparing/README.md#from-python) has a longer example. Errors are exceptions, `UsageError` and `Failure`.
Their text is what the command would print. A `FilePath` is a path as text or as a `pathlib.Path`.

`python tests/api_page.py` makes this page from the docstrings and the commands' `--help`.
"""

# Where each part of the page is in the code: the heading, and its functions or its class.
PARTS = (
    ("Functions", "api", ("compare", "read", "explain", "plan", "init")),
    ("What `compare` and `read` return", "api", ("Result",)),
    ("A finished run", "runs.read", ("Run", "Kind")),
    ("A recorded step of a worker", "runs.schema", ("Step",)),
    ("What `explain` returns", "reporting.explaining.explained", ("Explained",)),
    ("What `init` returns", "job.script.handle", ("ScriptJob",)),
)


def page() -> str:
    """Returns the page's text."""
    parts = [INTRODUCTION]
    package = griffe.load(
        "hvdtrain",
        search_paths=[ROOT],
        docstring_parser="google",
        docstring_options={"returns_multiple_items": False},
    )
    for heading, module, names in PARTS:
        parts.append(f"## {heading}\n")
        for name in names:
            parts.extend(_described(package[f"{module}.{name}"], level=3))
    return "\n".join(parts)


def _described(described: griffe.Object, level: int) -> list[str]:
    """Returns the paragraphs of a function or a class, with the class's public members."""
    lines = [f"{'#' * level} `{_signature(described)}`\n", *_docstring(described)]
    if described.path in COMMANDS:
        lines.append(_options(COMMANDS[described.path]()))
    if isinstance(described, griffe.Class):
        for member in described.members.values():
            if _is_public(member):
                lines.extend(_described(member, level + 1))
    return lines


def _is_public(member: griffe.Object | griffe.Alias) -> bool:
    is_field = isinstance(member, griffe.Attribute) and "property" not in member.labels
    return not member.name.startswith("_") and not is_field


def _signature(described: griffe.Object) -> str:
    """Returns a call or an attribute, with types: `plan(calibration: FilePath, **options) → dict`."""
    if isinstance(described, griffe.Class):
        return described.name
    if isinstance(described, griffe.Attribute):
        return f"{described.name}: {_type(described.annotation)}"
    parameters = [_parameter(parameter) for parameter in described.parameters]
    arguments = ", ".join(parameter for parameter in parameters if parameter != "self")
    return f"{described.name}({arguments}) → {_type(described.returns)}"


def _parameter(parameter: griffe.Parameter) -> str:
    stars = {"variadic positional": "*", "variadic keyword": "**"}
    text = stars.get(str(parameter.kind and parameter.kind.value), "") + parameter.name
    if parameter.annotation is not None:
        text += f": {_type(parameter.annotation)}"
    has_default = parameter.default is not None and not text.startswith("*")
    return f"{text} = {parameter.default}" if has_default else text


def _type(annotation: object) -> str:
    return str(annotation).replace('"', "").replace("'", "")


def _docstring(described: griffe.Object) -> list[str]:
    """Returns the docstring as Markdown: its text, and a list for each section."""
    if not described.docstring:
        return []
    lines = []
    for section in described.docstring.parsed:
        match section.kind:
            case griffe.DocstringSectionKind.text:
                lines.append(f"{_with_code(section.value)}\n")
            case griffe.DocstringSectionKind.parameters | griffe.DocstringSectionKind.attributes:
                lines.append(_list(section.kind.value.capitalize(), section.value))
            case griffe.DocstringSectionKind.returns:
                lines.append(f"Returns:\n\n- {_on_one_line(section.value[0].description)}\n")
            case griffe.DocstringSectionKind.raises:
                named = [(each.annotation, each.description) for each in section.value]
                text = "\n".join(f"- `{_type(name)}`: {_on_one_line(why)}" for name, why in named)
                lines.append(f"Raises:\n\n{text}\n")
    return lines


def _list(title: str, entries: list[griffe.DocstringNamedElement]) -> str:
    lines = [f"- `{entry.name}`: {_on_one_line(entry.description)}" for entry in entries]
    return "\n".join([f"{title}:\n", *lines, ""])


def _on_one_line(text: str) -> str:
    return " ".join(text.split())


def _with_code(text: str) -> str:
    """Returns the text with lines of Python in a fence."""
    paragraphs = []
    for paragraph in text.split("\n\n"):
        is_code = paragraph.startswith("import hvdtrain")
        paragraphs.append(f"```text\n{paragraph}\n```" if is_code else paragraph)
    return "\n\n".join(paragraphs)


def _compare_command() -> click.Command:
    from hvdtrain.comparing.command import compare

    return compare


def _predict_command() -> click.Command:
    from hvdtrain.planning.command import predict

    return predict


# Functions whose `**options` are those of a command.
COMMANDS = {"hvdtrain.api.compare": _compare_command, "hvdtrain.api.plan": _predict_command}


def _options(command: click.Command) -> str:
    """Returns a table of a command's options, as arguments."""
    lines = ["| argument | type | default | meaning |", "|---|---|---|---|"]
    for option in command.params:
        if not isinstance(option, click.Option) or option.hidden or not option.help:
            continue
        words = [word for word in option.opts if word.startswith("--")]
        names = [word.lstrip("-").replace("-", "_") for word in words]
        name = option.name if option.name in names else min(names, key=len)
        kind = "bool" if option.is_flag else option.type.name.replace("|", " or ")
        meaning = _on_one_line(option.help).replace("|", "\\|")
        lines.append(f"| `{name}` | {kind} | {_default(option)} | {meaning} |")
    return "\n".join([*lines, ""])


def _default(option: click.Option) -> str:
    """Returns an option's default as the page shows it; empty if there is none."""
    if isinstance(option.show_default, str):
        return option.show_default
    default = option.to_info_dict()["default"]
    return "" if default is None or default == "" else str(default)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
