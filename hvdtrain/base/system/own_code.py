"""A user's function that an option names.

The name is `./my_model.py:build`, or `package.module:build` of an installed package. `load` alone
imports the code. A name from a run folder, which may be a stranger's, is first checked by
runs.request.check_trusted.
"""

import ast
import contextlib
import difflib
import functools
import hashlib
import importlib
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from hvdtrain.base.config.untrusted import LARGEST_DOCUMENT, read_whole
from hvdtrain.base.errors import UsageError

_NAME = re.compile(r"(?P<place>.*\.py|[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):(?P<function>[A-Za-z_]\w*)")
_MAKERS_OF_NAMES = {"*", "globals", "setattr", "exec", "eval", "__getattr__"}
TIMM = "timm:"  # the prefix of timm's models, which are installed code


def is_code(name: str) -> bool:
    """Returns whether an option's value names a function."""
    return bool(_NAME.fullmatch(name)) and not name.startswith(TIMM)


def file_of(name: str) -> Path | None:
    """Returns the absolute path of the file with the function; None if the name has no file."""
    place, _, _ = name.rpartition(":")
    if not is_code(name) or not place.endswith(".py"):
        return None
    return Path(os.path.abspath(os.path.expanduser(place)))


def with_file(name: str, file: Path) -> str:
    """Returns the name of the same function in another file."""
    _, _, function = name.rpartition(":")
    return f"{file}:{function}"


def short(name: str) -> str:
    """Returns the name for tables, without the folder of a file."""
    file = file_of(name)
    return with_file(name, Path(file.name)) if file else name


def load(name: str, option: str) -> Callable[..., Any]:
    """Imports the function.

    Args:
        option: the option that has the name, for messages.

    Raises:
        UsageError: there is no such file, module or function, or importing it failed.
    """
    place, _, function = name.rpartition(":")
    file = file_of(name)
    if not file and Path(f"{place}.py").is_file():
        raise UsageError(
            f"{option} {name} is of an installed package: for the file here give "
            f"./{place}.py:{function}"
        )
    with told(option, name, "cannot be imported"):
        module = _import_file(file) if file else importlib.import_module(place)
    found = getattr(module, function, None)
    if not callable(found):
        functions = [
            key
            for key, value in vars(module).items()
            if inspect.isroutine(value) and not key.startswith("_")
        ]
        raise _no_function(name, option, functions)
    return found


def check_function(name: str, option: str) -> None:
    """Checks that a file has the function that an option names, without running its code.

    A file that gets names from elsewhere, as by `import *`, is not checked, nor is one that is not
    here or is no Python: `load` tells that.

    Raises:
        UsageError: the file has no such function.
    """
    file = file_of(name)
    _, _, function = name.rpartition(":")
    if not file:
        return
    if not file.exists():
        beside = [path.name for path in file.parent.glob("*.py")]
        similar = difflib.get_close_matches(file.name, beside, n=1, cutoff=0.8)
        if similar:
            raise UsageError(
                f"{option} {name}: there is no file {file.name}; did you mean {similar[0]}?"
            )
    try:
        module = ast.parse(read_whole(file, LARGEST_DOCUMENT))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return
    defined: set[str] = set()
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.Name):
            defined.add(node.id)
        elif isinstance(node, ast.alias):
            defined.add(node.asname or node.name)
    if function in defined or defined & _MAKERS_OF_NAMES:
        return
    functions = [node.name for node in module.body if isinstance(node, ast.FunctionDef)]
    raise _no_function(name, option, functions)


def _no_function(name: str, option: str, functions: Sequence[str]) -> UsageError:
    """Returns the error for a function that is not there, with the nearest and all others."""
    place, _, function = name.rpartition(":")
    similar = difflib.get_close_matches(function, functions, n=1, cutoff=0.5)
    nearest = f"; did you mean {similar[0]}?" if similar else ""
    listed = f": it has {', '.join(functions[:9])}" if functions else ""
    return UsageError(
        f"{option} {name}: there is no function {function} in {place}{listed}{nearest}"
    )


def code_hash(name: str) -> str | None:
    """Returns `sha256:` and 64 hex digits of the file that `load` has imported; None if unknown."""
    if not is_code(name):
        return None
    place, _, _ = name.rpartition(":")
    file = file_of(name)
    module = sys.modules.get(_module_name(file) if file else place)
    source = getattr(module, "__own_source__", None)
    if source is None:
        imported_file = getattr(module, "__file__", None)
        if not imported_file:
            return None
        source = Path(imported_file).read_bytes()
    return f"sha256:{hashlib.sha256(source).hexdigest()}"


@contextlib.contextmanager
def told(option: str, name: str, what: str) -> Iterator[None]:
    """Turns any exception of a user's code in the block into a UsageError.

    Args:
        option: the option that names the code.
        name: the code's name.
        what: what went wrong, as `cannot be imported`.

    Raises:
        UsageError: the block raised. The message names the exception, and the line of the user's
            file.
    """
    try:
        yield
    except UsageError:
        raise
    except (Exception, SystemExit) as error:
        file = file_of(name)
        number = line_in(file, error) if file else None
        where = f" (line {number} of {file.name})" if file and number else ""
        raise UsageError(f"{option} {name} {what}: {described(error)}{where}") from None


def described(error: BaseException) -> str:
    """Returns the type and the first line of a user's exception, as `OSError: no disk`."""
    kind = type(error).__name__
    try:
        message = str(error).strip()
    except Exception as other:
        message = f"its __str__ raises {type(other).__name__}"
    if not message:
        return kind
    return f"{kind}: {message.splitlines()[0][:200]}"


def line_in(file: Path, error: BaseException) -> int | None:
    """Returns the number of the last line of the file in a traceback; None if it is in none."""
    frames = traceback.extract_tb(error.__traceback__)
    numbers = [frame.lineno for frame in frames if is_of(file, frame.filename)]
    if isinstance(error, SyntaxError) and is_of(file, error.filename or ""):
        numbers.append(error.lineno)
    return numbers[-1] if numbers else None


def own_line(error: BaseException) -> str:
    """Returns the line of a loaded file that raised an exception, as `mine.py, line 7`.

    Returns "" if other code raised it. A user's forward calls ours, which waits for weights, and
    what ours raises there is no fault of the user's line.
    """
    line = ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        if "__own_source__" in frame.f_globals:
            line = f"{Path(frame.f_code.co_filename).name}, line {number}"
        elif frame.f_globals.get("__name__", "").startswith("hvdtrain."):
            line = ""
    return line


def is_of(file: Path, filename: str) -> bool:
    """Returns whether the code of a traceback's frame is the file's."""
    return Path(filename).absolute() == file.absolute()


def _module_name(file: Path) -> str:
    return f"hvdtrain_own_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"


@functools.cache
def _import_file(file: Path) -> ModuleType:
    """Imports a file, and keeps the bytes for its hash.

    The module can import files beside it. Their folder is the last in which Python looks.
    """
    source = file.read_bytes()
    module = ModuleType(_module_name(file))
    module.__file__ = str(file)
    module.__dict__["__own_source__"] = source
    sys.modules[module.__name__] = module
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    exec(compile(source, str(file), "exec"), module.__dict__)
    return module
