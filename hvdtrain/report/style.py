"""The style of plots: colours, lines, and how an SVG adapts to a page in a light or a dark theme."""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hvdtrain.report.runs import Kind

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 9.0  # inches of every figure; 72 SVG units each

# (light, dark). These colours change with the page's theme; all others have a contrast of at least 2.7:1 to both
# papers.
THEME = {
    "ink": ("#1d2430", "#e7eaf0"),
    "muted": ("#5a6474", "#a3adbd"),
    "grid": ("#dde2ea", "#343c4a"),
    "paper": ("#fefefe", "#12151b"),
}
INK, MUTED, GRID, PAPER = (light for light, _ in THEME.values())

# Colour and marker of each mode: blues for rings, the others for servers. Any two colours are at least 20 CIE76 units
# apart, also with protanopia, deuteranopia or tritanopia (simulated after Machado et al., 2009).
MODES = {
    "single": ("#929498", "o"),
    "allreduce": ("#0456c3", "s"),
    "ddp": ("#1c9edc", "D"),
    "ps-sync": ("#cb7811", "^"),
    "ps-ssp": ("#49672a", "v"),
    "ps-async": ("#893e88", "P"),
}
_UNKNOWN_MODE = ("#b0404c", "X")
# For global batches, from small to large, with mixtures between. Readable on both papers.
RAMP = ("#3b6fd4", "#1f9a8a", "#c07a00", "#c8402f")
LINES = ("-", "--", "-.", ":")

# Where a step's time goes, in order: label, colour, colour of text on it. Waiting has the colours that stand out.
STEP_PARTS = {
    "data": ("data", "#aab3c0", "#101010"),
    "forward": ("forward", "#7db7dd", "#101010"),
    "backward": ("backward", "#2b6ea6", "#fdfdfd"),
    "comm": ("exposed communication", "#d55e00", "#fdfdfd"),
    "optimizer": ("optimizer", "#8c6bb1", "#fdfdfd"),
    "barrier": ("waiting between steps", "#f0a35c", "#101010"),
    "lease": ("waiting for a share", "#e8c63c", "#101010"),
    "refresh": ("weights to evaluate", "#5fa796", "#101010"),
    "metrics": ("metrics", "#6d7684", "#fdfdfd"),
    "not_recorded": ("not recorded", "#d9c9c4", "#101010"),  # of versions before, which did not have all of these
}

RC: Any = {
    "svg.fonttype": "none",  # text stays text: small, sharp, selectable, read aloud
    "svg.hashsalt": "hvdtrain",  # the same figures give the same file
    "font.family": "sans-serif",
    "font.sans-serif": [
        "DejaVu Sans",
        "Verdana",
        "Arial",
        "sans-serif",
    ],  # layouts are computed with the first, and the others are not wider
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": MUTED,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "figure.facecolor": PAPER,
    "axes.facecolor": "none",
    "savefig.facecolor": PAPER,
    "legend.frameon": False,
}


def colour(kind: Kind) -> str:
    return MODES.get(kind.mode, _UNKNOWN_MODE)[0]


def marker(kind: Kind) -> str:
    return MODES.get(kind.mode, _UNKNOWN_MODE)[1]


def new_figure(height: float, columns: int = 1, rows: int = 1, sharey: bool = False) -> "tuple[Figure, list[Axes]]":
    """A figure of this height in inches, and its panels row by row."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False, sharey=sharey).flat)


def legend(figure: "Figure", panels: "Sequence[Axes]", columns: int = 6) -> None:
    """One legend for all panels, above them; a label that several panels share appears once."""
    handles: dict[Any, Any] = {}
    for axes in panels:
        handles |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    figure.legend(
        handles.values(), handles, loc="outside upper left", ncols=columns, handlelength=2.6, columnspacing=1.6
    )


def log_scale(axes: "Axes") -> None:
    """A logarithmic y axis with plain numbers: 0.1, 0.2, 0.5, 1, 2, 5."""
    from matplotlib.ticker import LogLocator, NullLocator

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(NullLocator())


def svg(figure: "Figure") -> str:
    """The figure as an SVG file for a light page; the same figure gives the same bytes."""
    import io

    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return file.getvalue()


def png(figure: "Figure") -> bytes:
    """The figure as a PNG file, 1,350 pixels wide."""
    import io

    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=150, metadata={"Software": None})
    return file.getvalue()


def inline(file: str, name: str, title: str) -> str:
    """An SVG file as an element of an HTML page, with unique ids, the theme's colours, and a title to read aloud."""
    element = file[file.index("<svg") :]
    element = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", element, flags=re.DOTALL)
    element = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", element).replace("xlink:href", "href")
    for role, (light, _) in THEME.items():
        element = element.replace(light, f"var(--{role})")
    box = re.search(r'viewBox="[^"]*"', element)
    opening = f'<svg {box[0] if box else ""} role="img" aria-label="{title}">'
    return re.sub(r"<svg[^>]*>", opening, element, count=1)


def css(theme: int) -> Mapping[str, str]:
    """The page's CSS variables in the light (0) or dark (1) theme."""
    return {role: values[theme] for role, values in THEME.items()}
