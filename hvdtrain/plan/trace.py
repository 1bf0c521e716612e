"""A simulated job as a Perfetto trace: a file that ui.perfetto.dev opens beside a measured one.

Written field by field: https://perfetto.dev/docs/reference/trace-packet-proto has the numbers.
"""

from collections.abc import Iterable
from pathlib import Path

Span = tuple[str, str, float, float]  # track, name, begin, end

_SEQUENCE, _BEGIN, _END = 1, 1, 2


def write(path: Path, spans: Iterable[Span], title: str) -> None:
    """Write spans, seconds from 0, with a track for each name of one; those of a track may nest, and not overlap."""
    tracks: dict[str, list[Span]] = {}
    for span in spans:
        tracks.setdefault(span[0], []).append(span)
    whole = _packet(_field(60, _field(1, 1) + _field(3, _field(1, 1) + _field(6, title))), cleared=True)
    for number, name in enumerate(sorted(tracks), 2):
        whole += _packet(_field(60, _field(1, number) + _field(2, name) + _field(5, 1)))
        events: list[tuple[float, int, bytes]] = []
        for _, label, begin, end in tracks[name]:
            events.append((begin, _BEGIN, _field(9, _BEGIN) + _field(11, number) + _field(23, label)))
            events.append((end, _END, _field(9, _END) + _field(11, number)))
        for time, _, event in sorted(events, key=lambda event: (event[0], -event[1])):  # ends before begins
            whole += _packet(_field(8, round(time * 1e9)) + _field(11, event))
    path.write_bytes(whole)


def _packet(content: bytes, cleared: bool = False) -> bytes:
    return _field(1, content + _field(10, _SEQUENCE) + (_field(13, 1) if cleared else b""))


def _field(number: int, value: int | str | bytes) -> bytes:
    """A field of a protobuf message: a varint, or what is as long as it says."""
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    content = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])
