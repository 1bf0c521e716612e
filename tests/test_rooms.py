"""What import-linter cannot say of the rooms: which modules know parts of other packages."""

import ast
import re
from pathlib import Path

import hvdtrain

PACKAGE = Path(hvdtrain.__file__).parent


def imported(path):
    """The dotted names that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_the_wire_alone_knows_rpc():
    files = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if any(name.startswith("torch.distributed.rpc") for name in imported(path))
    }
    assert files == {"job/wire/rpc.py"}


def test_every_python_that_is_started_is_told_to_import_nothing_of_the_current_folder():
    started = [
        line
        for path in PACKAGE.rglob("*.py")
        for line in re.findall(r"sys\.executable, .*", path.read_text())
    ]
    assert len(started) > 5
    assert [
        line for line in started if not re.match(r'sys\.executable, "-(P|I|S", "-E", "-P)', line)
    ] == []


def test_one_console_prints():
    """Which shows what comes from anybody's folder as text."""
    files = [
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if {"rich.console", "rich.console.Console"} & {*imported(path)}
    ]
    assert files == ["base/console.py"]
