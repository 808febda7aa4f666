"""Draw a lesson's curves as an SVG that can be read on a light and on a dark page."""
from start import FOLDER

COLOURS = ("#2f81c7", "#d9772b", "#3a9d5d", "#c0504d", "#9673c9", "#8a8a8a")
INK = "#858585"  # of text and axes: halfway between black and white


def draw(name: str, *panels: dict) -> str | None:
    """Write runs/lessons/NAME.svg, with the panels side by side. Return its path, or None.

    A panel has "title", "x" and "y" (the labels of its axes), "curves" {label: (xs, ys)}, and may
    have "log": "x", "y" or "xy". A curve of two or more points is a line, and a point a dot.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        print("no picture: pip install matplotlib")
        return None
    look = {"svg.hashsalt": name, "font.size": 10, "text.color": INK, "axes.edgecolor": INK,
            "axes.labelcolor": INK, "axes.titlecolor": INK, "xtick.color": INK, "ytick.color": INK,
            "axes.spines.top": False, "axes.spines.right": False}
    with rc_context(look):
        figure = Figure((4.2 * len(panels), 3.2), layout="constrained")
        for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels):
            for (label, (xs, ys)), colour in zip(panel["curves"].items(), COLOURS):
                axes.plot(xs, ys, "-" if len(xs) > 1 else "o", color=colour, label=label)
            for axis in panel.get("log", ""):
                getattr(axes, f"set_{axis}scale")("log")
            axes.set(title=panel["title"], xlabel=panel["x"], ylabel=panel["y"])
            axes.grid(color=INK, alpha=0.2)
            if len(panel["curves"]) > 1:
                axes.legend(frameon=False)
        path = FOLDER / f"{name}.svg"
        path.parent.mkdir(parents=True, exist_ok=True)
        # Without a date the same numbers give the same file.
        figure.savefig(path, transparent=True, metadata={"Date": None})
    print(f"picture: {path}")
    return str(path)
