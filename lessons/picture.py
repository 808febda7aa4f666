"""Draw a lesson's curves as an SVG that can be read on a light and on a dark page."""
from start import FOLDER

COLOURS = ("#2f81c7", "#d9772b", "#3a9d5d", "#c0504d", "#9673c9", "#8a8a8a", "#b59a00")
INK = "#858585"  # of text and axes: halfway between black and white


def draw(name: str, *panels: dict, share_y: bool = False) -> str | None:
    """Write runs/lessons/NAME.svg, with the panels side by side. Return its path, or
    None.

    A panel has "title", "x" and "y" (the labels of its axes), "curves" {label: (xs,
    ys)}, and may have "log": "x", "y" or "xy", "dashed": labels of curves, and
    "legend": "beside". A curve of two or more points is a line, and a point a dot. With
    share_y all panels have the same y axis.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        print("no picture: pip install matplotlib")
        return None
    look = {"svg.hashsalt": name, "font.size": 13, "text.color": INK, "axes.edgecolor": INK,
            "axes.labelcolor": INK, "axes.titlecolor": INK, "xtick.color": INK, "ytick.color": INK,
            "axes.spines.top": False, "axes.spines.right": False}
    with rc_context(look):
        beside = sum(panel.get("legend") == "beside" for panel in panels)
        figure = Figure((4.6 * len(panels) + 1.8 * beside, 3.8), layout="constrained")
        grid = figure.subplots(1, len(panels), squeeze=False, sharey=share_y)[0]
        for axes, panel in zip(grid, panels):
            for (label, (xs, ys)), colour in zip(panel["curves"].items(), COLOURS):
                line = (0, (4, 4)) if label in panel.get("dashed", ()) else "-"
                marker = "" if len(xs) > 1 else "o"
                axes.plot(xs, ys, marker=marker, ls=line, color=colour, label=label)
            for axis in panel.get("log", ""):
                getattr(axes, f"set_{axis}scale")("log")
            axes.set(title=panel["title"], xlabel=panel["x"], ylabel=panel["y"])
            if panel["x"] == "step":
                axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.grid(color=INK, alpha=0.2)
            if len(panel["curves"]) > 1:
                place = {}
                if panel.get("legend") == "beside":
                    place = {"loc": "upper left", "bbox_to_anchor": (1, 1)}
                axes.legend(frameon=False, fontsize=11, **place)
        path = FOLDER / f"{name}.svg"
        path.parent.mkdir(parents=True, exist_ok=True)
        # Without a date the same numbers give the same file.
        figure.savefig(path, transparent=True, metadata={"Date": None})
    print(f"picture: {path}")
    return str(path)
