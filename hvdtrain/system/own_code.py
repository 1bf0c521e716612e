"""A user's function that an option names: `./my_model.py:build`, or `package.module:build` of an installed package.

It is code: `load` alone imports it. Whoever has the name from a run folder, which may be a stranger's, asks first: see
runs.request.check_trusted.
"""

import contextlib
import functools
import hashlib
import importlib
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from hvdtrain.errors import UsageError

_NAME = re.compile(r"(?P<place>.*\.py|[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):(?P<function>[A-Za-z_]\w*)")
TIMM = "timm:"  # of models by their names there: installed code, and nobody else's


def is_code(name: str) -> bool:
    """Whether an option's value names a function."""
    return bool(_NAME.fullmatch(name)) and not name.startswith(TIMM)


def file_of(name: str) -> Path | None:
    """The file that is imported, absolute; None where the name is no file's."""
    place = name.rpartition(":")[0]
    return Path(os.path.abspath(Path(place).expanduser())) if is_code(name) and place.endswith(".py") else None


def with_file(name: str, file: Path) -> str:
    """The same function of a file elsewhere."""
    return f"{file}:{name.rpartition(':')[2]}"


def short(name: str) -> str:
    """What stands for it in tables: without the folder of a file."""
    return with_file(name, Path(file.name)) if (file := file_of(name)) else name


def load(name: str, option: str) -> Callable[..., Any]:
    """Import the function.

    Args:
        option: that has the name, for messages.

    Raises:
        UsageError: there is no such file, module or function, or importing it failed.
    """
    file, _, function = name.rpartition(":")
    if not file_of(name) and Path(f"{file}.py").is_file():
        raise UsageError(f"{option} {name} is of an installed package: for the file here give ./{file}.py:{function}")
    with told(option, name, "cannot be imported"):
        module = _of_file(path) if (path := file_of(name)) else importlib.import_module(file)
    found = getattr(module, function, None)
    if not callable(found):
        there = [key for key, value in vars(module).items() if inspect.isroutine(value) and not key.startswith("_")]
        listed = f": it has {', '.join(there[:9])}" if there else ""
        raise UsageError(f"{option} {name}: there is no function {function} in {file}{listed}")
    return found


def code_hash(name: str) -> str | None:
    """`sha256:` and 64 hex digits, of the file that `load` has imported; None where that is not known."""
    place = name.rpartition(":")[0]
    if not is_code(name):
        return None
    module = sys.modules.get(_module_name(path) if (path := file_of(name)) else place)
    source = getattr(module, "__own_source__", None)
    if source is None and (file := getattr(module, "__file__", None)):
        source = Path(file).read_bytes()
    return f"sha256:{hashlib.sha256(source).hexdigest()}" if source is not None else None


@contextlib.contextmanager
def told(option: str, name: str, what: str) -> Iterator[None]:
    """UsageError where a user's code, or what it is given to, raises anything: the option, what went wrong, where."""
    try:
        yield
    except UsageError:
        raise
    except (Exception, SystemExit) as error:
        lines = str(error).strip().splitlines() or [""]
        file, frames = file_of(name), traceback.extract_tb(error.__traceback__)
        numbers = [frame.lineno for frame in frames if frame.filename == str(file)]
        where = f" (line {numbers[-1]} of {file.name})" if file and numbers else ""
        raise UsageError(f"{option} {name} {what}: {type(error).__name__}: {lines[0][:200]}{where}") from None


def _module_name(file: Path) -> str:
    return f"hvdtrain_own_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"


@functools.cache
def _of_file(file: Path) -> ModuleType:
    """The module, from the same bytes as its hash. What lies beside the file can be imported too, after all else."""
    source = file.read_bytes()
    module = ModuleType(_module_name(file))
    module.__file__ = str(file)
    module.__dict__["__own_source__"] = source
    sys.modules[module.__name__] = module
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    exec(compile(source, str(file), "exec"), module.__dict__)
    return module
