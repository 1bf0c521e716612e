"""Commands and files in the fenced blocks of pages."""

import re
from typing import NamedTuple

FENCED = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
# The sentence before a block that is a file, or the end of one: "… `my_mode.py`:".
NAMED = re.compile(r"`([^`\s]+)`[^`\n]*:\n+\Z")


class Block(NamedTuple):
    """A fenced block.

    Attributes:
        language: what follows the first fence.
        text: what is between the fences.
        before: the paragraph before it.
    """

    language: str
    text: str
    before: str

    @property
    def file(self) -> str:
        """The file that the paragraph before it names last."""
        named = NAMED.search(self.before)
        assert named, f"no file is named before the block:\n{self.text}"
        return named[1]

    @property
    def is_added(self) -> bool:
        """Whether it is added at the end of that file, and is not all of it."""
        return "at the end of" in self.before.splitlines()[-2]


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a page, in order."""
    return [Block(found[1], found[2], text[: found.start()]) for found in FENCED.finditer(text)]


def joined(text: str) -> list[str]:
    """Lines, with those that end in a backslash and the next as one."""
    return re.sub(r"\s*\\\n\s*", " ", text).splitlines()


def run_here(text: str) -> list[str]:
    """The commands of ```bash blocks."""
    return [
        line for block in blocks(text) if block.language == "bash" for line in joined(block.text)
    ]
