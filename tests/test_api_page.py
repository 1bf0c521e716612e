"""hvdtrain/API.md says what the code says, of all that a Python program may use."""

from itertools import pairwise

from api_page import PAGE, page

import hvdtrain as hv


def test_the_page_is_made_of_todays_docstrings():
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python tests/api_page.py"


def test_the_page_has_all_names_that_the_package_offers():
    text = PAGE.read_text(encoding="utf-8")
    assert not [name for name in hv.__all__ if f"`{name}" not in text]


def test_everything_on_the_page_is_explained():
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line]
    headings = [
        line for line, after in pairwise(lines) if line.startswith("###") and after.startswith("#")
    ]
    assert not headings, "these have no docstring"
