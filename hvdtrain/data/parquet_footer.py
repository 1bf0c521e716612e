"""The row groups of a Parquet file, from its footer (parquet.thrift, in Thrift's compact protocol).

pyarrow has them too, but asks for a column of a damaged footer outside of any handler: the process ends (26.0.1).
"""

from typing import Any, NamedTuple

MAX_GROUP_BYTES = 2**30  # of a row group's images, and of its labels
MAX_FILE_ROWS = 2**24


class Group(NamedTuple):
    """A row group of images.

    Attributes:
        start: where in the file its images begin; they have `size` bytes there, and without compression `unpacked`.
        is_plain: whether images stand there as they are.
    """

    rows: int
    start: int
    size: int
    unpacked: int
    is_plain: bool


def row_groups(footer: bytes, image: str, label: str, end: int) -> list[Group]:
    """The row groups of a file with columns of images and labels.

    Args:
        end: where in the file the footer begins.

    Raises:
        ValueError: a row group has more than is believed, or does not lie in the file; the footer is damaged.
    """
    try:
        metadata, _ = _struct(footer, 0)
        found, rows = [], 0
        for number, group in enumerate(metadata[4]):
            columns = {b".".join(column[3][3]): column[3] for column in group[1]}
            rows += group[3]
            if not 0 <= group[3] <= rows <= MAX_FILE_ROWS:
                raise ValueError(f"row group {number} has {group[3]:,} rows")
            _group(columns[label.encode()], group[3], end, number)
            found.append(_group(columns[f"{image}.bytes".encode()], group[3], end, number))
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"its footer is damaged ({error!r:.80})") from None
    return found


def _group(chunk: dict[int, Any], rows: int, end: int, number: int) -> Group:
    """Of a column in a row group."""
    start, size, unpacked, has_dictionary = chunk[9], chunk[7], chunk[6], chunk.get(11, 0) > 0
    if has_dictionary:
        start = min(start, chunk[11])
    if not 0 <= unpacked <= MAX_GROUP_BYTES:
        raise ValueError(f"row group {number} has {unpacked:,} bytes of a column")
    if rows and (start < 4 or size < 0 or start + size > end):
        raise ValueError(f"row group {number} does not lie in the file")
    if chunk[5] != rows:
        raise ValueError(f"row group {number} has {chunk[5]:,} values in {rows:,} rows")
    return Group(rows, start, size, unpacked, chunk[4] == 0 and not has_dictionary)


def _struct(data: bytes, at: int) -> tuple[dict[int, Any], int]:
    """The fields of a struct by number, and where it ends."""
    fields: dict[int, Any] = {}
    number = 0
    while head := data[at]:
        at += 1
        if head >> 4:
            number += head >> 4
        else:
            number, at = _integer(data, at)
        fields[number], at = (head & 15 == 1, at) if head & 15 in (1, 2) else _value(data, at, head & 15)
    return fields, at + 1


def _value(data: bytes, at: int, kind: int) -> tuple[Any, int]:
    """A value of a kind of the protocol, and where it ends."""
    match kind:
        case 1 | 2 | 3:  # a bool in a list, or a byte
            return data[at], at + 1
        case 4 | 5 | 6:
            return _integer(data, at)
        case 7:
            return data[at : at + 8], at + 8
        case 8:
            length, at = _varint(data, at)
            return data[at : at + length], at + length
        case 9 | 10:
            head, at = data[at], at + 1
            length, at = (head >> 4, at) if head >> 4 < 15 else _varint(data, at)
            values = []
            for _ in range(length):
                value, at = _value(data, at, head & 15)
                values.append(value)
            return values, at
        case 12:
            return _struct(data, at)
    raise ValueError(f"its footer is damaged (a value of kind {kind})")


def _integer(data: bytes, at: int) -> tuple[int, int]:
    value, at = _varint(data, at)
    return value >> 1 ^ -(value & 1), at


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while data[at] > 127:
        value |= (data[at] & 127) << shift
        at, shift = at + 1, shift + 7
        if shift > 63:
            raise ValueError("its footer is damaged (a number has no end)")
    return value | data[at] << shift, at + 1
