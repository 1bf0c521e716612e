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


def test_the_wire_and_its_naive_peer_alone_know_rpc():
    files = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if any(name.startswith("torch.distributed.rpc") for name in imported(path))
    }
    assert files == {"ps/rpc.py", "bench/ranks.py"}


def test_every_python_that_is_started_is_told_to_import_nothing_of_the_current_folder():
    started = [line for path in PACKAGE.rglob("*.py") for line in re.findall(r"sys\.executable, .*", path.read_text())]
    ours = [line for line in started if "sys.argv" not in line]  # bench/mxnet_peer.py, a file by its path
    assert len(ours) > 5 and all(re.match(r'sys\.executable, "-(P|I|S", "-E", "-P)', line) for line in ours), ours


def test_one_console_prints():
    """Which shows what comes from anybody's folder as text."""
    files = [
        path.name for path in PACKAGE.rglob("*.py") if {"rich.console", "rich.console.Console"} & {*imported(path)}
    ]
    assert files == ["console.py"]
