"""Downloads from a real server on this machine: resumed, checked, kept."""

import contextlib
import hashlib

import pytest
from helpers import archives
from helpers.servers import serving

from hvdtrain.base.errors import Failure
from hvdtrain.data.build import build
from hvdtrain.data.download import fetch
from hvdtrain.data.folder import scan
from hvdtrain.data.recipe import Recipe


def recipe(content, *urls, **changed):
    origin = {"file": "in.zip", "urls": list(urls), "bytes": len(content)}
    origin["sha256"] = hashlib.sha256(content).hexdigest()
    return Recipe(
        "some", "t", "s", "imagenet", "l", "c", 1, 0, 0.2, "", {"classes": ""}, origin | changed
    )


@pytest.fixture
def serve(monkeypatch, tmp_path):
    """Starts a server of one file at the address `url`."""
    monkeypatch.setenv("HVDTRAIN_CACHE", str(tmp_path / "cache"))
    with contextlib.ExitStack() as stack:

        def start(content):
            server = stack.enter_context(serving({"/in.zip": content}))
            server.url += "/in.zip"
            return server

        yield start


CONTENT = archives.zipped(archives.class_folders(["cat", "dog"], 5))


@pytest.mark.parametrize("kind", ["sha256", "md5"])
def test_each_address_is_tried_and_what_is_not_what_was_published_is_not_kept(
    kind, serve, tmp_path
):
    wrong, endless, right = serve(CONTENT[:-1] + b"?"), serve(CONTENT + bytes(99)), serve(CONTENT)
    some = recipe(CONTENT, "http://127.0.0.1:1/in.zip", wrong.url, endless.url)
    if kind == "md5":
        some.origin["md5"] = hashlib.md5(CONTENT).hexdigest()
        del some.origin["sha256"]
    with pytest.raises(
        Failure, match=rf"1/in.zip: .*refused.*/in.zip: its {kind} is .*, not .*sends more than"
    ):
        fetch(some)
    assert not [
        path for path in (tmp_path / "cache" / "downloads").iterdir() if "lock" not in path.name
    ]
    some.origin["urls"].append(right.url)
    assert fetch(some).read_bytes() == CONTENT


def test_a_recipe_with_an_address_builds_by_name(serve, tmp_path, monkeypatch):
    server = serve(CONTENT)
    monkeypatch.setattr(Recipe, "load", lambda name: recipe(CONTENT, server.url))
    out = build("some", tmp_path / "out")
    assert len(scan(out).train) == 8
    assert build("some", tmp_path / "out") == out
    assert len(server.asked) == 1


def test_what_is_cut_off_is_told_and_fetched_anew(serve, capsys):
    server = serve(CONTENT)
    server.cuts = [100]
    with pytest.raises(
        Failure, match=r"some cannot be downloaded \(.*cut off after 100 of .*\); try --archive"
    ):
        fetch(recipe(CONTENT, server.url))
    file = fetch(recipe(CONTENT, server.url))
    assert file.read_bytes() == CONTENT and "downloading some" in capsys.readouterr().err
    assert fetch(recipe(CONTENT, server.url)) == file  # kept
    assert len(server.asked) == 2
    assert [path.name for path in file.parent.iterdir()] == ["in.zip"]
