"""The virtual hosts' names in /etc/hosts: a block between two marker lines, and what others wrote stays."""

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

BEGIN, END = "# hvdtrain hosts: begin", "# hvdtrain hosts: end"
_OURS = re.compile(r"10\.77\.77\.\d+ node\d+")


def with_block(text: str, addresses: Mapping[str, str]) -> str:
    """The file's text with a block of these names, each with its address."""
    gap = "" if text.endswith("\n") or not text else "\n"
    return text + gap + "\n".join([BEGIN, *(f"{address} {name}" for name, address in addresses.items()), END]) + "\n"


def without_block(text: str) -> str:
    """The file's text without blocks. Of a damaged one, whose end is missing, other lines stay."""
    kept, inside = [], False
    for line in text.splitlines(keepends=True):
        word = line.rstrip("\r\n")
        inside = word == BEGIN or (inside and bool(_OURS.fullmatch(word)))
        if not inside and word != END:
            kept.append(line)
    return "".join(kept)


def replace(file: Path, text: str) -> None:
    """Write a file so that its reader finds the old text or the new, whole, also where the machine fails meanwhile."""
    new = file.with_name(f".{file.name}.hvdtrain")
    try:
        with new.open("w") as opened:
            opened.write(text)
            opened.flush()
            os.fsync(opened.fileno())
        shutil.copystat(file, new)
        found = file.stat()
        os.chown(new, found.st_uid, found.st_gid)
        os.replace(new, file)
    except OSError as error:
        with contextlib.suppress(OSError):
            new.unlink()
        if error.errno not in (errno.EBUSY, errno.EXDEV):
            raise
        file.write_text(text)  # mounted by a container: it cannot be replaced
