"""Curves of a run as inline SVG: small multiples of every number that changes."""
import math
from html import escape
from statistics import fmean

from core.data import is_finite

PARTS = 20  # of a run, over each of which the bold curve is a mean
UNITS = {"peak_memory_mb": "MiB"}
UNITS |= dict.fromkeys(("entropy", "kl", "approx_kl", "held_out_loss"), "nats per token")


def curves(logs):
    """Return the curves of all numbers in some logs (lists of rows with a "step"), as HTML.

    Numbers that never change are listed in one line.
    """
    figures, constant = [], []
    for log in logs:
        for name in dict.fromkeys(key for row in log for key in row if key != "step"):
            points = points_of(log, name)
            values = [value for _, value in points]
            if len(set(values)) > 1 and points[0][0] < points[-1][0]:
                figures.append(chart(name, points))
            elif points:
                constant.append(f"{escape(name)} {number(values[-1])}")
    text = ""
    if figures:
        text = ("<h2>Curves</h2><p>Thin: as logged. Bold: means of a twentieth of the run each. "
                f"Top right: the last value.</p><div class=curves>{''.join(figures)}</div>")
    if constant:
        text += f"<p>Unchanged throughout: {', '.join(constant)}.</p>"
    return text


def points_of(log, name):
    """Return the (step, value) pairs of one name that a chart can show."""
    points = []
    for row in log:
        step, value = row.get("step"), row.get(name)
        if type(step) is int and is_finite(value):
            points.append((step, value))
    return points


def stretches(points, n):
    """Return the points in at most n parts, all but the last of one length."""
    size = math.ceil(len(points) / n)
    return [points[start:start + size] for start in range(0, len(points), size)]


def chart(name, points):
    """Return one curve as a <figure>, between its lowest and its highest value."""
    steps, values = zip(*points)
    first, last = steps[0], steps[-1]
    low, high = min(values), max(values)

    def polyline(kind, drawn):
        places = []
        for step, value in drawn:
            x = 10 + 300 * (step - first) / (last - first)
            y = 120 - 100 * (value - low) / (high - low)
            places.append(f"{x:.1f},{y:.1f}")
        return f'<polyline class={kind} points="{" ".join(places)}" />'

    means = [map(fmean, zip(*part)) for part in stretches(points, PARTS)]
    name, unit = escape(name), UNITS.get(name, "")
    return (f"<figure><figcaption><span><b>{name}</b> <i>{unit}</i></span>"
            f'<b>{number(values[-1])}</b></figcaption>'
            f'<svg viewBox="0 0 320 140" role=img aria-label="{name}">'
            f"<text x=10 y=12>{number(high)}</text><text x=10 y=135>{number(low)}</text>"
            f"<text x=310 y=135 text-anchor=end>steps {first} to {last}</text>"
            f"{polyline('raw', points)}{polyline('smooth', means)}</svg></figure>")


def number(value):
    """Return a number as a reader wants it: "1,888", "0.0168". None becomes "-"."""
    if value is None:
        return "-"
    if not isinstance(value, (int, float)):
        return str(value)
    if 999.5 <= abs(value) < 1e15:
        return f"{value:,.0f}"
    return f"{value:.3g}"
