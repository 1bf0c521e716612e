"""What a comparison is about, in words: model, data, batch, workers, hosts, and their links."""

from itertools import chain
from statistics import median

from hvdtrain.base import modes
from hvdtrain.base.formatting import three_digits, with_noun
from hvdtrain.reporting.comparisons import ComparedRuns
from hvdtrain.runs.network_bound import network_bound
from hvdtrain.runs.read import Run


def subject(compared: ComparedRuns) -> str:
    """Returns what decides the answer of a comparison.

    These are the model and its weights, the data, the global batch and its learning rate, the
    workers, their hosts with cores or GPUs, the network, and who was made slow: `vggf, 2.2M weights,
    digits; batch 32, lr 0.0003; 2 workers on one host of 2 cores; --slow 1:4x`.
    """
    distributed = [run for run in compared.runs if run.kind.is_distributed]
    run = (distributed or compared.runs)[0]
    manifest = run.manifest
    batch = f"batch {manifest.global_batch}" if manifest.global_batch else ""
    rate = f"lr {manifest.lr:g}" if manifest.lr else ""
    if manifest.lr_around:
        rate = f"lr looked for around {manifest.lr_around:g}"
    what = _join([manifest.model or "", _weights_words(run), manifest.dataset or ""])
    workers = _workers_words(distributed or [run])
    where = f"{workers} on {_place_words(compared, run)}{_link_words(compared)}"
    slow = "" if manifest.slow.asked == "none" else f"--slow {manifest.slow.asked}"
    return "; ".join(filter(None, [what, _join([batch, rate]), where, slow]))


def _join(words: list[str]) -> str:
    """Returns the words that are not empty, with commas between."""
    return ", ".join(filter(None, words))


def _weights_words(run: Run) -> str:
    """Returns `2.2M weights`; empty if their number is not known."""
    weights = run.manifest.parameters or 0
    if weights >= 1e5:
        return f"{three_digits(weights / 1e6)}M weights"
    return f"{weights:,} weights" if weights else ""


def _workers_words(runs: list[Run]) -> str:
    """Returns `2 workers`, or `2 or 4 workers`. One worker beside more is left out."""
    sizes = sorted({run.kind.workers for run in runs})
    if len(sizes) > 1 and sizes[0] == 1:
        sizes = sizes[1:]
    number = " or ".join(map(str, sizes))
    return f"{number} worker" if number == "1" else f"{number} workers"


def _place_words(compared: ComparedRuns, run: Run) -> str:
    """Returns `2 hosts of 4 cores`.

    Args:
        compared: the comparison.
        run: the run whose hosts are named.
    """
    hardware = run.manifest.hardware
    hosts = len(hardware.hosts)
    place = "one host" if hosts < 2 else with_noun(hosts, "host")
    cores = hardware.cores_usable or hardware.cores
    each = with_noun(cores, "core") if cores else ""
    if run.on_gpu and run.manifest.share_gpu:
        each = f"{with_noun(len(hardware.gpus), 'GPU')}, which workers share"
    elif run.on_gpu:
        each = "GPUs"
    elif any(other.on_gpu for other in compared.runs):
        each = f"{each or 'cores'}, and one process on its GPU"
    return f"{place} of {each}" if each else place


def _measured_gbit(compared: ComparedRuns) -> list[float]:
    """Returns every measurement of a link between hosts, in Gbit/s."""
    links = chain.from_iterable(run.manifest.network.pairs for run in compared.runs)
    return [link.gbit_s for link in links]


def _link_words(compared: ComparedRuns) -> str:
    """Returns ` at 0.1 Gbit/s`, the median of the measured links; empty if none was measured."""
    speeds = _measured_gbit(compared)
    return f" at {three_digits(median(speeds))} Gbit/s" if speeds else ""


def pushes_words(compared: ComparedRuns) -> str:
    """Returns how pushes become a step in the modes that say so; else empty."""
    modes_by_words: dict[str, dict[str, None]] = {}
    for kind, runs in compared.by_kind.items():
        if kind.mode not in modes.names():
            continue
        words_of = modes.declared(kind.mode).step_words
        words = words_of(runs[0].manifest) if words_of else ""
        if words:
            modes_by_words.setdefault(words, {})[kind.mode] = None
    return "; ".join(f"{' and '.join(users)}: {words}" for words, users in modes_by_words.items())


def links_words(compared: ComparedRuns) -> str:
    """Returns the measured links between hosts, and the most samples/s that they allow.

    Empty if no link was measured.
    """
    speeds = _measured_gbit(compared)
    if not speeds:
        return ""
    bounds = []
    for kind, runs in compared.by_kind.items():
        bound = network_bound(runs[0])
        if bound:
            bounds.append(f"{kind.label} {three_digits(bound)}")
    ends = dict.fromkeys([three_digits(min(speeds)), three_digits(max(speeds))])
    text = f"Links between hosts: {' to '.join(ends)} Gbit/s"
    if bounds:
        most = ", ".join(bounds)
        text += f"; whatever computes, they carry at most this many samples/s: {most}"
    return text + "."
