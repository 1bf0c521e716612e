"""The testbed's block in /etc/hosts: what else is in the file stays."""

import errno
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.launch.hosts_file import BEGIN, END, replace, with_block, without_block

NODES = {"node1": "10.77.77.1", "node2": "10.77.77.2"}
LINE = st.sampled_from(
    ["127.0.0.1 localhost", "", "10.0.0.1 node1", "# hvdtrain", "::1 ip6-localhost", "10.77.77.1 nodes"]
)


@given(st.lists(LINE), st.booleans())
def test_a_block_comes_and_goes(lines, ends):
    text = "\n".join(lines) + ("\n" if ends and lines else "")
    named = with_block(text, NODES)
    assert f"{BEGIN}\n10.77.77.1 node1\n10.77.77.2 node2\n{END}\n" in named
    assert without_block(named).splitlines() == text.splitlines()


@pytest.mark.parametrize(
    "text",
    [
        f"a\n{BEGIN}\n10.77.77.1 node1\n192.0.2.1 mine\n10.0.0.3 also\n",
        f"a\n{BEGIN}\n10.77.77.1 node1\n192.0.2.1 mine\n{END}\n10.0.0.3 also\n",
        f"a\n{BEGIN}\n192.0.2.1 mine\n{BEGIN}\n10.77.77.1 node1\n{END}\n10.0.0.3 also\n",
        f"a\n{END}\n192.0.2.1 mine\n10.0.0.3 also\n",
    ],
    ids=["without an end", "with a line of others", "twice", "without a begin"],
)
def test_a_damaged_block_takes_no_lines_of_others_along(text):
    assert without_block(text) == "a\n192.0.2.1 mine\n10.0.0.3 also\n"


def test_the_file_is_replaced_whole_with_its_mode(tmp_path, monkeypatch):
    file = tmp_path / "hosts"
    file.write_text("old\n")
    file.chmod(0o640)
    number = file.stat().st_ino
    replace(file, "new\n")
    assert file.read_text() == "new\n" and file.stat().st_mode & 0o777 == 0o640 and file.stat().st_ino != number

    def mounted(*_):
        raise OSError(errno.EBUSY, "busy")

    monkeypatch.setattr(os, "replace", mounted)  # as a container's /etc/hosts
    replace(file, "newer\n")
    assert file.read_text() == "newer\n" and os.listdir(tmp_path) == ["hosts"]
