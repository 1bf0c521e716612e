"""Decoded images of small data sets, which the cache keeps for the next process.

A comparison makes dozens of short runs, and each would decode all images again.
"""

import hashlib
import os
import stat
from contextlib import suppress
from pathlib import Path

import PIL
import torch
from PIL import ImageFile, features

from hvdtrain.base.config.writing import write_whole
from hvdtrain.base.errors import UsageError
from hvdtrain.data.file_states import FileStates, look
from hvdtrain.data.folder import Files, Samples
from hvdtrain.data.storage import cache_root, locked

# The cache keeps so many images or more. Fewer are decoded in no time.
KEPT_IMAGES = 500
# The most bytes of decoded images that the cache keeps in a file.
MOST_BYTES = 64 * 2**20
# How many files the cache keeps. The oldest are removed.
MOST_FILES = 8
# The modules of this folder that decide which pixels are made of a file, as this process has loaded
# them: they may change while it runs.
_DECODE = ("loader.py", "image.py")
_CODE = b"".join(Path(__file__).with_name(module).read_bytes() for module in _DECODE)
_DIGEST_BYTES = hashlib.sha256().digest_size


class DecodedImages:
    """A file of the cache with all images of one part of a folder, as the loader decodes them.

    The file is for the images as they are, and for the code as it is: its name is a hash of both.
    Only a file of this process's user is read, and no other user can read it.

    Args:
        samples: The samples of the part.
        states: The state of their files.
        side: See Loader.
        resize: See Loader.
    """

    def __init__(self, samples: Files, states: FileStates, side: int, resize: int) -> None:
        self._samples = samples
        self._states = states
        made_of = hashlib.sha256(f"{states.state} {side} {resize} {_decoder()}".encode())
        made_of.update(_CODE)
        self._file = cache_root() / "decoded" / f"{made_of.hexdigest()[:32]}.pixels"

    def read(self, pixels: torch.Tensor) -> bool:
        """Reads all images. Returns whether the file is there and whole.

        Args:
            pixels: Gets the images, [images, 3, side, side] uint8. It holds anything if the file
                is not whole.
        """
        content = pixels.view(-1).numpy().data
        try:
            with open(self._file, "rb", opener=_open_without_waiting) as file:
                if not _is_own_file(file.fileno()):
                    return False
                digest = file.read(_DIGEST_BYTES)
                is_long_enough = file.readinto(content) == content.nbytes
        except OSError:
            return False
        return is_long_enough and digest == hashlib.sha256(content).digest()

    def write(self, pixels: torch.Tensor) -> None:
        """Keeps decoded images, [images, 3, side, side] uint8, unless a file has changed meanwhile.

        Where the cache cannot be written, or another process writes the same, nothing happens.
        """
        content = pixels.view(-1).numpy().data
        with suppress(OSError, UsageError):
            if look(self._samples.paths()) != self._states:
                return
            with locked(self._file, wait=False):
                self._file.unlink(missing_ok=True)  # it may be anybody's, and a pipe
                digest = hashlib.sha256(content).digest()
                write_whole(self._file, b"".join([digest, content]), mode=0o600)
            _remove_oldest(self._file.parent)


def decoded_images(samples: Samples, side: int, resize: int) -> DecodedImages | None:
    """Returns where the cache keeps these images decoded; None if it keeps no such images.

    Args:
        samples: The samples of a part of a data set.
        side: See Loader.
        resize: See Loader.
    """
    if not isinstance(samples, Files) or len(samples) < KEPT_IMAGES:
        return None
    if len(samples) * 3 * side * side > MOST_BYTES:
        return None
    try:
        states = look(samples.paths())
    except OSError:  # the loader says which image cannot be read
        return None
    return DecodedImages(samples, states, side, resize) if states.are_settled else None


def _decoder() -> str:
    """Returns what decides beside our code which pixels are made of a file."""
    libraries = [features.version(name) for name in ("jpg", "webp")]
    return f"{PIL.__version__} {libraries} {ImageFile.LOAD_TRUNCATED_IMAGES}"


def _open_without_waiting(path: str, flags: int) -> int:
    """Opens a file that may be anybody's: a link is refused, and a pipe does not block."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def _is_own_file(descriptor: int) -> bool:
    """Returns whether an open file is a file of this process's user. Others may write anything."""
    status = os.fstat(descriptor)
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()


def _remove_oldest(folder: Path) -> None:
    files = sorted(folder.glob("*.pixels"), key=lambda file: file.stat().st_mtime)
    for file in files[:-MOST_FILES]:
        file.unlink(missing_ok=True)
