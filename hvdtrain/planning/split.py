"""H hosts, or so much money an hour: the best split into workers and servers, and what the ring does with the same."""

from collections.abc import Sequence
from dataclasses import replace

from hvdtrain.planning.calibration import Calibration
from hvdtrain.planning.predict import Row, codec_of, row
from hvdtrain.planning.scenario import RING_MODES, SERVER_MODES, Scenario

COMPRESSIONS = {"fp16", "int8"}  # tried beside none: each side has the best of those that it can send


def splits(
    calibration: Calibration, asked: Scenario, names: Sequence[str], hosts: int, price_host: float,
    price_server: float, seed: int = 0,
) -> list[Row]:  # fmt: skip
    """Rows as predict.row has them, the one with most samples a second first, with `price` an hour.

    A budget is what H worker hosts cost. A server on a host of its own costs `price_server`: where that is less, there
    is money for more of them. Servers beside workers cost nothing more, and take their links and cores.

    Args:
        asked: with one compression, or `none`: then those are tried that the calibration knows.
        names: of modes.
        hosts: of the ring, each with asked.workers_per_host workers.
    """
    known = sorted(calibration.codecs.keys() & COMPRESSIONS) if asked.compression == "none" else [asked.compression]
    rows = []
    for mode in names:
        places = [(hosts, 0, "dedicated")] if mode in RING_MODES else []
        if mode in SERVER_MODES:
            places = _candidates(hosts, hosts * price_host, price_host, price_server)
        for codec in dict.fromkeys(codec_of(calibration, mode, name) for name in ("none", *known)):
            for worker_hosts, servers, placement in places:
                job = replace(
                    asked, mode=mode, workers=worker_hosts * asked.workers_per_host, servers=servers,
                    placement=placement, compression=codec,
                )  # fmt: skip
                price = worker_hosts * price_host + (servers * price_server if placement == "dedicated" else 0)
                rows.append(row(calibration, job, seed) | {"worker_hosts": worker_hosts, "price": price})
    return sorted(rows, key=lambda one: -one["samples_per_s"])


def _candidates(hosts: int, budget: float, price_host: float, price_server: float) -> list[tuple[int, int, str]]:
    """(worker hosts, servers, placement) that the budget pays for: few of each kind, powers of two and the ends."""
    tried = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, hosts, hosts // 2, hosts * 3 // 4, hosts - 1}
    counts = sorted(count for count in tried if 0 < count <= hosts)
    places = [(hosts, servers, "shared") for servers in counts]
    for worker_hosts in counts:
        servers = int((budget - worker_hosts * price_host) / price_server + 1e-9)
        if servers > 0:
            places.append((worker_hosts, min(servers, 4 * hosts), "dedicated"))
    return places
