"""Pictures for pages that are read on white and on black: SVG, no background, letters in grey."""
COLORS = {"blue": "#3b82f6", "orange": "#f08a24", "green": "#22a06b", "red": "#e5484d",
          "purple": "#9a6dd7", "teal": "#12a5b0", "grey": "#7d8590"}


def figure(rows=1, columns=1, width=7.0, height=3.2, **options):
    """Return a matplotlib figure and its panels, whose letters and lines are seen on any ground."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    grey = COLORS["grey"]
    style = {"text.color": grey, "axes.labelcolor": grey, "axes.edgecolor": grey,
             "xtick.color": grey, "ytick.color": grey, "axes.titlecolor": grey,
             "legend.labelcolor": grey,
             "grid.color": grey, "grid.alpha": 0.25, "axes.grid": True, "axes.spines.top": False,
             "axes.spines.right": False, "svg.fonttype": "none", "svg.hashsalt": "bench",
             "font.family": ["DejaVu Sans"],
             "font.size": 10, "legend.frameon": False,
             "axes.prop_cycle": plt.cycler(color=list(COLORS.values()))}
    plt.rcParams.update(style)
    return plt.subplots(rows, columns, figsize=(width, height), **options)


def save(picture, path):
    """Write the picture as SVG without a date, so that the same numbers make the same file."""
    picture.tight_layout()
    picture.savefig(path, transparent=True, metadata={"Date": None})
    import matplotlib.pyplot as plt
    plt.close(picture)
