"""What import-linter cannot say of the rooms: which modules know parts of other packages."""

import ast
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
    assert files == {"ps/rpc.py"}
