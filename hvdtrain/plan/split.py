"""H hosts, or so much money an hour: the best split into workers and servers, and what the ring does with the same."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hvdtrain.plan.calibration import Calibration
from hvdtrain.plan.predict import Question, codec_of, row
from hvdtrain.plan.scenario import RING_MODES, SERVER_MODES

Row = dict[str, Any]
COMPRESSIONS = {"fp16", "int8"}  # tried beside none: each side has the best of those that it can send


def splits(
    calibration: Calibration, question: Question, hosts: int, bandwidth: float, price_host: float, price_server: float,
    compressions: Sequence[str],
) -> list[Row]:  # fmt: skip
    """Rows as predict.row has them, the one with most samples a second first, with `price` an hour.

    A budget is what H worker hosts cost. A server on a host of its own costs `price_server`: where that is less, there
    is money for more of them. Servers beside workers cost nothing more, and take their links and cores.

    Args:
        hosts: of the ring, each with question.per_host workers.
    """
    budget, found = hosts * price_host, []
    for mode in question.modes:
        places = [(hosts, 0, "dedicated")] if mode in RING_MODES else []
        if mode in SERVER_MODES:
            places = _candidates(hosts, budget, price_host, price_server)
        for codec in dict.fromkeys(codec_of(calibration, mode, name) for name in compressions):
            for own, servers, placement in places:
                asked = replace(question, placement=placement, compression=codec)
                one = row(calibration, asked, mode, own * question.per_host, servers, bandwidth)
                price = own * price_host + (servers * price_server if placement == "dedicated" else 0)
                found.append(one | {"worker_hosts": own, "price": price})
    return sorted(found, key=lambda one: -one["samples_per_s"])


def _candidates(hosts: int, budget: float, price_host: float, price_server: float) -> list[tuple[int, int, str]]:
    """(worker hosts, servers, placement) that the budget pays for: few of each kind, powers of two and the ends."""
    found = [(hosts, servers, "shared") for servers in _some(hosts)]
    for own in _some(hosts):
        servers = int((budget - own * price_host) / price_server + 1e-9) if price_server else hosts
        if servers > 0:
            found.append((own, min(servers, 4 * hosts), "dedicated"))
    return found


def _some(most: int) -> list[int]:
    """1, 2, 4 … and what lies around a half and three quarters, up to `most`."""
    numbers = {most, max(1, most // 2), max(1, most * 3 // 4), max(1, most - 1)}
    power = 1
    while power < most:
        numbers.add(power)
        power *= 2
    return sorted(numbers)
