"""Files changed at random, as damage or a hostile hand would."""

import contextlib
import copy as copies
import json
import os
import random
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hvdtrain.runs import schema

VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1,
    7,
    2**31,
    2**63,
    10**30,
    1e-320,
    1e308,
    float("nan"),
    float("inf"),
    -float("inf"),
    0.5,
    "",
    "0",
    "nan",
    "x",
    "../../x",
    "/etc/passwd",
    "a\nb",
    "\x1b[31m",
    "[bold]",
    "[/]",
    "\0",
    "é" * 300,
    "a" * 5000,
    [],
    {},
    [[]],
    [None],
    {"": None},
    [1, "a", None],
    {"a": {"b": []}},
    [0] * 1000,
]
WORDS = [
    "",
    "-1",
    "nan",
    "1e400",
    "[]",
    "{}",
    '"x"',
    "true",
    "''",
    "9" * 400,
    '"""',
    "[1, 2",
    "{a = 1}",
    "2026-01-01",
]
# A path, an option, what a terminal obeys, what a browser does, and rich's markup.
SIGN = "../--hostile\x1b]0;x\x07\u202e<script>[bold red]"
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
HOSTS = "ab1.-_@:=#/ \t\n,;$`|\\'\"*~[]0"


def changed(content: bytes, rng: random.Random) -> bytes:
    """The content of a file with something else in one place or in a few."""
    ways = [_flipped, _cut, _spliced, _with_another_number]
    if content[:1] in (b"{", b"["):
        ways += [_with_another_value] * 6
    if b" = " in content:
        ways += [_with_another_setting] * 4
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        content = rng.choice(ways)(content, rng)
    return content


def _flipped(content: bytes, rng: random.Random) -> bytes:
    made = bytearray(content or b"\0")
    for _ in range(rng.choice([1, 1, 3, 20])):
        made[rng.randrange(len(made))] = rng.randrange(256)
    return bytes(made)


def _cut(content: bytes, rng: random.Random) -> bytes:
    return content[: rng.randrange(len(content) + 1)]


def _spliced(content: bytes, rng: random.Random) -> bytes:
    at, begin = rng.randrange(len(content) + 1), rng.randrange(len(content) + 1)
    return (
        content[:at]
        + rng.choice([rng.randbytes(8), content[begin : begin + 200], b"[" * 3000])
        + content[at:]
    )


def _with_another_number(content: bytes, rng: random.Random) -> bytes:
    numbers = list(re.finditer(rb"-?\d+(\.\d+)?", content))
    if not numbers:
        return content
    found = rng.choice(numbers)
    other = rng.choice([b"-1", b"0", b"", b"1e999", b"99999999999999999999", b"nan", b"x", b"0.5"])
    return content[: found.start()] + other + content[found.end() :]


def _with_another_value(content: bytes, rng: random.Random) -> bytes:
    """Of JSON, or of a line of JSON lines, or of a snapshot's state, which its checksum follows."""
    lines = content.split(b"\n")
    at = rng.randrange(max(1, len(lines) - 1)) if _is_json(lines[0]) else None
    try:
        tree = json.loads(content if at is None else lines[at])
    except (ValueError, RecursionError):
        return content
    tree = _replaced(tree, rng)
    if at is None:
        return json.dumps(tree).encode()
    lines[at] = json.dumps(tree).encode()
    return b"\n".join(lines)


def _is_json(line: bytes) -> bool:
    with contextlib.suppress(ValueError, RecursionError):
        json.loads(line)
        return True
    return False


def _replaced(tree: Any, rng: random.Random) -> Any:
    """The tree with one of its nodes replaced, removed or added."""
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        for key in (
            node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
        ):
            places.append((node, key))
            walk(node[key])

    walk(tree)
    if not places or rng.random() < 0.02:
        return rng.choice(VALUES)
    node, key = rng.choice(places)
    if rng.random() < 0.15:
        del node[key]
    elif rng.random() < 0.1 and isinstance(node, dict):
        node["another"] = rng.choice(VALUES)
    else:
        node[key] = rng.choice(VALUES)
    return tree


def _with_another_setting(content: bytes, rng: random.Random) -> bytes:
    """Of TOML: another value behind an equals sign."""
    lines = content.split(b"\n")
    settings = [n for n, line in enumerate(lines) if b" = " in line]
    if settings:
        at = rng.choice(settings)
        lines[at] = lines[at].split(b" = ")[0] + b" = " + rng.choice(WORDS).encode()
    return b"\n".join(lines)


def spoil(path: Path, rng: random.Random) -> None:
    """Change a file, or put something else in its place."""
    how = rng.random()
    if how < 0.9:
        content = changed(path.read_bytes(), rng)
        path.unlink()  # it has another name
        path.write_bytes(content)
        return
    path.unlink()
    if how < 0.94:
        path.mkdir()
    elif how < 0.96:
        path.symlink_to(path.name)  # to itself


def hosts(rng: random.Random) -> str:
    return "".join(rng.choice(HOSTS) for _ in range(rng.randrange(1, 30)))


def tree(root: Path) -> dict[str, tuple[int, int]]:
    """All there is below a folder, with its size and when it was changed."""
    found = {}
    for path in root.rglob("*"):
        stat = path.lstat()
        found[str(path.relative_to(root))] = (
            (0, 0) if path.is_dir() else (stat.st_size, stat.st_mtime_ns)
        )
    return found


def copy(source: Path, target: Path) -> None:
    """Files are links to the same ones, not to be written to."""
    shutil.copytree(source, target, copy_function=os.link)


def strings(tree: Any, at: tuple = ()) -> Iterator[tuple]:
    """Where in JSON the strings are, as keys and positions."""
    if isinstance(tree, str):
        yield at
    for key, inner in (
        tree.items()
        if isinstance(tree, dict)
        else enumerate(tree)
        if isinstance(tree, list)
        else ()
    ):
        yield from strings(inner, (*at, key))


def planted(tree: Any, places: list[tuple], text: str) -> Any:
    """The tree with that text in these places."""
    tree = copies.deepcopy(tree)
    for *way, last in places:
        inner = tree
        for key in way:
            inner = inner[key]
        inner[last] = text
    return tree


def is_read(manifest: Any, at: tuple, text: str) -> bool:
    """Whether a manifest with that text there is taken for one."""
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(schema.UnreadableFile):
        (Path(folder) / "manifest.json").write_text(json.dumps(planted(manifest, [at], text)))
        schema.read(Path(folder), schema.Manifest)
        return True
    return False


_done: list[str] | None = None
_DOING = (
    "open",
    "os.",
    "shutil.",
    "subprocess.",
    "socket.",
    "tempfile.",
    "glob.",
    "ctypes.dlopen",
    "import",
)


def _watch(event: str, args: tuple) -> None:
    if _done is not None and event.startswith(_DOING) and "--hostile" in str(args):
        _done.append(f"{event}{args}")


sys.addaudithook(_watch)  # for good


@contextlib.contextmanager
def nothing_done_with_the_sign() -> Iterator[None]:
    """In the block no file is opened, no process started, nobody connected to and nothing imported
    by such a name.
    """
    global _done
    _done = done = []
    try:
        yield
    finally:
        _done = None
    assert not done, done
