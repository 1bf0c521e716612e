"""Hostile and broken archives and images: a line, and nothing anywhere else."""

import contextlib
import gzip
import io
import lzma
import os
import stat
import struct
import tarfile
import tracemalloc
import zipfile

import pytest
from helpers import archives
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.base.errors import Failure, UsageError
from hvdtrain.data import archive
from hvdtrain.data.archive import Tree
from hvdtrain.data.build import build

GOOD = archives.class_folders(["cat", "dog"], 4)


def tar_with(info):
    buffer = io.BytesIO(archives.tarred(GOOD))
    with tarfile.open(fileobj=buffer, mode="a") as tar:
        tar.addfile(info, io.BytesIO(b"x" * info.size))
    return buffer.getvalue()


def entry(name, kind=tarfile.REGTYPE, target=""):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    info.size = 1 if kind == tarfile.REGTYPE else 0
    return info


def zip_with(name, content=b"x", mode=stat.S_IFREG | 0o644, compression=zipfile.ZIP_STORED):
    buffer = io.BytesIO(archives.zipped(GOOD))
    with zipfile.ZipFile(buffer, "a") as made:
        info = zipfile.ZipInfo(name)
        info.external_attr, info.compress_type = mode << 16, compression
        made.writestr(info, content)
    return buffer.getvalue()


def tar_of_headers(kind, size, times=1):
    """A compressed tar of headers that say more, each as long as it claims to be; tarfile makes
    none.
    """
    info = tarfile.TarInfo("@LongLink")
    info.type, info.size = kind, size
    header = info.tobuf(tarfile.GNU_FORMAT)
    content = (
        b"30 comment=" + b"x" * (size - 11)
        if kind in (tarfile.XHDTYPE, tarfile.XGLTYPE)
        else b"x" * size
    )
    block = header + content + bytes(-size % 512)
    return gzip.compress(
        tarfile.TarInfo("cat").tobuf() + block * times + tar_with(entry("cat/7.png")), 9
    )


def sparse_map(entries):
    """A PAX header of a sparse file, whose map claims so many entries."""
    records = b"".join(
        b"%d %b\n" % (len(record) + 4, record)
        for record in (
            b"GNU.sparse.major=1",
            b"GNU.sparse.minor=0",
            b"GNU.sparse.name=a.png",
            b"GNU.sparse.realsize=9",
        )
    )
    pax, file = tarfile.TarInfo("pax"), tarfile.TarInfo("cat/a.png")
    pax.type, pax.size = tarfile.XHDTYPE, len(records)
    body = b"%d\n" % entries + b"1\n" * (2 * entries)
    file.size = len(body)
    padded = [
        pax.tobuf(),
        records + bytes(-len(records) % 512),
        file.tobuf(),
        body + bytes(-len(body) % 512),
    ]
    return gzip.compress(b"".join(padded) + bytes(1024))


@contextlib.contextmanager
def at_most(size):
    """The block takes no more bytes of memory."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < size
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK]
)
def test_a_tars_headers_are_bounded_before_they_are_read(kind, tmp_path):
    (tmp_path / "in.tgz").write_bytes(tar_of_headers(kind, 50_000_000))
    assert (tmp_path / "in.tgz").stat().st_size < 100_000
    refusal = "in.tgz' holds a header of 50,000,000 bytes, more than 65,536: not read"
    with at_most(5_000_000), pytest.raises(Failure, match=refusal):
        Tree(tmp_path / "in.tgz")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (lambda: sparse_map(100_000), "a sparse file: not read"),
        (lambda: tar_with(entry("cat/a.png", tarfile.GNUTYPE_SPARSE)), "a sparse file: not read"),
        (lambda: tar_of_headers(tarfile.XHDTYPE, 30, 3000), "is damaged"),
        (lambda: tar_with(entry("cat/" + "x" * 5000)), "a name of 5,004 characters: not read"),
    ],
    ids=["sparse map", "sparse", "headers of headers", "name"],
)
def test_what_else_a_header_can_ask_for(content, words, tmp_path):
    (tmp_path / "in").write_bytes(content())
    with pytest.raises(Failure, match=words) as refused:
        Tree(tmp_path / "in")
    assert "\n" not in str(refused.value)


def test_folders_in_a_tar_are_not_kept(tmp_path):
    folders = b"".join(entry(f"cat/{i * 7919:x>80}", tarfile.DIRTYPE).tobuf() for i in range(8_000))
    (tmp_path / "in.tgz").write_bytes(gzip.compress(folders + tar_with(entry("cat/7.png"))))
    with at_most(5_000_000):
        assert len(Tree(tmp_path / "in.tgz").members) == len(GOOD) + 1


ZEROS = bytes(20_000_000)
# What no list of members has, and is decompressed all the same.
UNLISTED = {
    "after the end": lambda: gzip.compress(tar_with(entry("cat/7.png")) + ZEROS),
    "after the end, xz": lambda: lzma.compress(tar_with(entry("cat/7.png")) + ZEROS, preset=0),
    "in a second stream": lambda: (
        gzip.compress(tar_with(entry("cat/7.png"))) + gzip.compress(ZEROS)
    ),
    "in a hidden file": lambda: archives.tarred({".x": ZEROS} | GOOD, "w:gz"),
}


@pytest.mark.parametrize("content", UNLISTED.values(), ids=UNLISTED.keys())
def test_all_that_is_decompressed_counts_as_unpacked(content, tmp_path):
    (tmp_path / "in").write_bytes(content())
    assert (tmp_path / "in").stat().st_size < len(ZEROS) / archive.MAX_EXPANSION
    with pytest.raises(Failure, match="in' holds more than 200 times its size, unpacked: not read"):
        Tree(tmp_path / "in")


def test_a_member_of_a_zip_is_no_larger_in_memory_than_it_says(tmp_path):
    content = bytearray(zip_with("cat/bomb.png", ZEROS, compression=zipfile.ZIP_DEFLATED))
    at = content.rindex(b"PK\x01\x02")  # its entry in the list, which has its size at 24
    content[at + 24 : at + 28] = struct.pack("<I", 100)
    (tmp_path / "in").write_bytes(content)
    [bomb] = [member for member in Tree(tmp_path / "in").members if member.size == 100]
    with at_most(1_000_000), pytest.raises(Failure, match="damaged at cat/bomb.png"):
        bomb.read_bytes()


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_zip_by_methods_that_unpack_without_limit_is_refused(method, tmp_path):
    (tmp_path / "in").write_bytes(zip_with("cat/9.png", archives.picture(5), compression=method))
    with pytest.raises(
        Failure,
        match=r"holds 'cat/9.png', not packed by deflate \(unpack it, and give the folder\)",
    ):
        Tree(tmp_path / "in")


HOSTILE = {
    "tar, parent": lambda: tar_with(entry("../evil.png")),
    "tar, absolute": lambda: tar_with(entry("/tmp/evil.png")),
    "tar, symbolic link": lambda: tar_with(entry("cat/link.png", tarfile.SYMTYPE, "/etc/passwd")),
    "tar, device": lambda: tar_with(entry("cat/zero.png", tarfile.CHRTYPE)),
    "zip, parent": lambda: zip_with("../evil.png"),
    "zip, drive": lambda: zip_with("C:/evil.png"),
    "zip, backslash": lambda: zip_with("..\\evil.png"),
    "zip, symbolic link": lambda: zip_with("cat/link.png", b"/etc/passwd", stat.S_IFLNK | 0o777),
    "zip, bomb": lambda: zip_with(
        "cat/bomb.png", bytes(30_000_000), compression=zipfile.ZIP_DEFLATED
    ),
    "zip, no image": lambda: zip_with("cat/9.png", b"no image"),
    "zip, two files in one": lambda: zip_with("CAT/0.png", archives.picture(5)),
    "tgz, bomb": lambda: archives.tarred(GOOD | {"cat/bomb.png": bytes(60_000_000)}, "w:gz"),
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_archive_is_refused_in_a_line_and_leaves_nothing(content, tmp_path):
    place = tmp_path / "place"
    place.mkdir()
    (place / "in").write_bytes(content())
    with pytest.raises(Failure) as refused:
        build("imagenet-slice", place / "out", images_from=place / "in")
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 400
    assert [path.relative_to(tmp_path).as_posix() for path in sorted(tmp_path.rglob("*"))] == [
        "place",
        "place/in",
    ]
    assert not os.path.exists("/tmp/evil.png")


WHOLE = {
    "zip": archives.zipped(GOOD),
    "tar": archives.tarred(GOOD),
    "tgz": archives.tarred(GOOD, "w:gz"),
}


@given(
    kind=st.sampled_from(["zip", "tar", "tgz"]),
    cut=st.booleans(),
    at=st.floats(0, 0.999),
    bit=st.integers(0, 7),
)
def test_an_archive_that_is_cut_off_or_changed_gives_its_images_or_a_line(
    kind, cut, at, bit, tmp_path_factory
):
    """What is read is what was in it, wherever it has a checksum, or reading fails as it should."""
    content = bytearray(WHOLE[kind])
    position = int(at * len(content))
    if cut:
        del content[position:]
    else:
        content[position] ^= 1 << bit
    place = tmp_path_factory.mktemp("cut") / "in"
    place.write_bytes(content)
    try:
        tree = Tree(place)
        for member in tree.members:
            read = member.read_bytes()
            if kind != "tar" and member.name in GOOD:  # a tar has checksums of headers alone
                assert read == GOOD[member.name]
    except (Failure, UsageError) as refused:
        assert "\n" not in str(refused)


def test_too_many_members_are_not_read(monkeypatch, tmp_path):
    monkeypatch.setattr(archive, "MAX_MEMBERS", 5)
    (tmp_path / "in").write_bytes(archives.zipped(GOOD))
    with pytest.raises(Failure, match="more than 5 files"):
        Tree(tmp_path / "in")


def test_an_encrypted_zip_is_refused(tmp_path):
    content = bytearray(archives.zipped({"cat/0.png": archives.picture(0)}))
    for header, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):  # the flag in both headers
        content[content.index(header) + offset] |= 1
    (tmp_path / "in").write_bytes(content)
    with pytest.raises(Failure, match="damaged at cat/0.png.*encrypted"):
        Tree(tmp_path / "in").members[0].read_bytes()


def test_a_tar_of_tars_is_read_where_it_lies(tmp_path):
    inner = archives.tarred({"a.JPEG": b"first", "b.JPEG": b"second"})
    tars = {
        "n1.tar": b"no tar",
        "n2.tar": inner,
        "without_end.tar": inner[:2048],
        "cut_off.tar": inner[:1536],
    }
    (tmp_path / "out.tar").write_bytes(archives.tarred(tars))
    tree = Tree(tmp_path / "out.tar")
    for whole in tree.members[1:3]:
        assert [member.read_bytes() for member in tree.members_of_tar(whole)] == [
            b"first",
            b"second",
        ]
    for broken in (tree.members[0], tree.members[3]):
        with pytest.raises(Failure, match=f"damaged at {broken.name}"):
            tree.members_of_tar(broken)


def test_what_is_no_archive_is_refused(tmp_path):
    (tmp_path / "in").write_bytes(b"text")
    with pytest.raises(UsageError, match="neither a folder nor a zip or tar"):
        Tree(tmp_path / "in")
    with pytest.raises(UsageError, match="there is no file or folder"):
        Tree(tmp_path / "nosuch")
