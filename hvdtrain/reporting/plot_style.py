"""The style of plots: colours, lines, and how an SVG adapts to a light or a dark page."""

import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.base import modes
from hvdtrain.base.config.writing import replacing
from hvdtrain.runs.read import Kind

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Inches of every figure, of 72 SVG units each.
WIDTH = 9.0

LIGHT = 0
DARK = 1
# (light, dark). These colours change with the page's theme. All others have a contrast of at least
# 2.7:1 to both papers.
THEME = {
    "ink": ("#1d2430", "#e7eaf0"),
    "muted": ("#5a6474", "#a3adbd"),
    "grid": ("#dde2ea", "#343c4a"),
    "paper": ("#fefefe", "#12151b"),
    "wash": ("#f3f5f8", "#1b2028"),
}
INK = THEME["ink"][LIGHT]
MUTED = THEME["muted"][LIGHT]
GRID = THEME["grid"][LIGHT]
PAPER = THEME["paper"][LIGHT]

_UNKNOWN_MODE = ("#b0404c", "X")
LINES = ("-", "--", "-.", ":")

# The parts of a step's time, in order: label, colour, colour of text on it. Waiting has the colours
# that stand out. Neighbours are at least 20 CIE76 units apart, as the modes are. So are the
# optimizer and backward, the optimizer and metrics, and metrics and data: what lies between them
# may be missing.
STEP_PARTS = {
    "data": ("data", "#aab3c0", "#101010"),
    "forward": ("forward", "#62aee6", "#101010"),
    "backward": ("backward", "#2b6ea6", "#fdfdfd"),
    "comm": ("exposed communication", "#d55e00", "#fdfdfd"),
    "optimizer": ("optimizer", "#9573f1", "#101010"),
    "barrier": ("waiting between steps", "#ee9e66", "#101010"),
    "lease": ("waiting for a share", "#e6cc1f", "#101010"),
    "refresh": ("weights to evaluate", "#52d9aa", "#101010"),
    "metrics": ("metrics", "#565f66", "#fdfdfd"),
}

RC: Any = {
    "svg.fonttype": "none",  # text stays text: small, sharp, selectable, read aloud
    "svg.hashsalt": "hvdtrain",  # the same figures give the same file
    "text.parse_math": False,  # a dollar in a model's name is a dollar
    # Layouts are computed with the first font, and the others are not wider.
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial", "sans-serif"],
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


def look_of(mode: str) -> tuple[str, str]:
    """Returns colour and marker of a mode, also of a mode that is not known here."""
    if mode not in modes.names():
        return _UNKNOWN_MODE
    known = modes.declared(mode)
    return known.colour, known.marker


def look_of_side(mode: str, family: str) -> tuple[str, str]:
    """Returns colour and marker of a mode.

    What stands for one machine looks like one process, whatever the mode.
    """
    return look_of("single" if family == modes.ONE_MACHINE else mode)


def colour(kind: Kind) -> str:
    return look_of_side(kind.mode, kind.family)[0]


def new_figure(
    height: float, columns: int = 1, rows: int = 1, height_ratios: Sequence[float] | None = None
) -> "tuple[Figure, list[Axes]]":
    """Returns a figure of a height in inches, and its panels row by row."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, height_ratios=height_ratios)
    return figure, list(panels.flat)


def legend(figure: "Figure", panels: "Sequence[Axes]") -> None:
    """Adds one legend for all panels, above them. A label that panels share appears once."""
    handle_of_label: dict[Any, Any] = {}
    for axes in panels:
        handles, labels = axes.get_legend_handles_labels()
        handle_of_label |= dict(zip(labels, handles, strict=True))
    columns = 1
    if handle_of_label:
        # A line has room for 115 characters, and a handle takes 9 of them.
        characters = sum(len(label) + 9 for label in handle_of_label)
        columns = max(1, int(len(handle_of_label) * 115 / characters))
    figure.legend(
        handle_of_label.values(),
        handle_of_label,
        loc="outside upper left",
        ncols=columns,
        handlelength=2.6,
        columnspacing=1.6,
    )


def log_scale(axes: "Axes") -> None:
    """Makes the y axis logarithmic, with plain numbers: 0.1, 0.2, 0.5, 1, 2, 5."""
    from matplotlib.ticker import LogLocator, NullLocator

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(NullLocator())


def ratio_scale(axes: "Axes", low: float, high: float) -> None:
    """Makes the x axis logarithmic, for ratios: twice and half are equally far from 1.

    Args:
        axes: the panel.
        low: the smallest ratio that is shown.
        high: the largest ratio that is shown.
    """
    from matplotlib.ticker import FixedLocator, NullLocator

    low = max(low, 0.02)
    high = min(high, 50.0)
    margin = max(1.04, (high / low) ** 0.06)
    fine = [0.8, 0.85, 0.9, 0.95, 1, 1.05, 1.1, 1.15, 1.2, 1.3]
    coarse = [0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 10, 20, 50]
    axes.set_xscale("log")
    axes.set_xlim(low / margin, high * margin)
    axes.xaxis.set_major_locator(FixedLocator(fine if high / low < 1.7 else coarse))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_locator(NullLocator())


def rows(axes: "Axes", labels: Sequence[str]) -> None:
    """Gives each label a row, the first on top."""
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(True, axis="x")


def svg(figure: "Figure") -> str:
    """Returns the figure as an SVG file for a light page. The same figure gives the same bytes."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    file = io.StringIO()
    # savefig would draw the figure twice to compute the layout.
    with rc_context(RC):
        FigureCanvasSVG(figure).print_svg(
            file, metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
        )
    return file.getvalue()


def save(figure: "Figure", path: Path) -> None:
    """Writes a figure as PNG, SVG or PDF, by the name of the file.

    Raises:
        OSError: the file cannot be written.
    """
    from matplotlib import rc_context

    with rc_context(RC), replacing(path) as file:
        figure.savefig(file, dpi=150)


def png(figure: "Figure") -> bytes:
    """Returns the figure as a PNG file, 1,350 pixels wide."""
    from matplotlib import rc_context

    file = io.BytesIO()
    with rc_context(RC):
        figure.savefig(file, format="png", dpi=150, metadata={"Software": None})
    return file.getvalue()


def inline(file: str, name: str, title: str) -> str:
    """Returns an SVG file as an element of an HTML page, in the theme's colours.

    Args:
        file: the text of the SVG file.
        name: a prefix that makes the ids unique on the page.
        title: what a screen reader reads aloud, escaped.
    """
    element = file[file.index("<svg") :]
    element = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", element, flags=re.DOTALL)
    element = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", element)
    element = element.replace("xlink:href", "href")
    for role, (light, _) in THEME.items():
        element = element.replace(light, f"var(--{role})")
    box = re.search(r'viewBox="[^"]*"', element)
    opening = f'<svg {box[0] if box else ""} role="img" aria-label="{title}">'
    return re.sub(r"<svg[^>]*>", opening, element, count=1)


def css(theme: int) -> Mapping[str, str]:
    """Returns the page's CSS variables in a theme, LIGHT or DARK."""
    return {role: values[theme] for role, values in THEME.items()}
