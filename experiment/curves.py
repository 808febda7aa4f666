"""Curves of a run as inline SVG: small multiples of every number that changes."""
import math
from dataclasses import dataclass
from html import escape
from itertools import accumulate

from experiment.records import number

MAX_POINTS = 150        # of a curve; in longer runs several steps share a point
MAX_DOTS = 30           # of a curve; the pointer over a dot shows its value
UNITS = {"peak_memory_mb": "MiB"}
UNITS |= dict.fromkeys(("entropy", "kl", "approx_kl", "held_out_loss"), "nats per token")


def curves(logs):
    """Return the curves of all numbers in some logs (lists of rows with a "step"), as HTML.

    Numbers that never change are listed in one line.
    """
    figures, constant = [], []
    for log in logs:
        names = dict.fromkeys(key for row in log for key in row if key != "step")
        for name in names:
            points = points_of(log, name)
            if not points:
                continue
            xs, ys = zip(*points)
            if max(ys) - min(ys) > 1e-6 * max(map(abs, ys)) and xs[0] < xs[-1]:
                figures.append(chart(name, xs, ys))
            else:
                constant.append(f"{escape(name)} {number(ys[-1])}")
    text = []
    if figures:
        text.append("<h2>Curves</h2><p>Thin: as logged. Bold: smoothed over a twentieth of the "
                    "run. Point at a dot to read it; top right: its last value.</p>"
                    f"<div class=curves>{''.join(figures)}</div>")
    if constant:
        text.append(f"<p>Unchanged throughout: {', '.join(constant)}.</p>")
    return "".join(text)


def points_of(log, name):
    """Return the (step, value) pairs of one name that a chart can show."""
    points = []
    for row in log:
        step, value = row.get("step"), row.get(name)
        if type(step) is int and type(value) in (int, float) and abs(value) <= 1e300:
            points.append((step, value))
    return points


@dataclass
class Axis:
    """A linear map from the values low..high to the pixels start..end."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value):
        share = (value - self.low) / (self.high - self.low)
        return round(self.start + (self.end - self.start) * share, 1)

    def ticks(self):
        """Return (value, label) of two to six round numbers, with the digits that they need."""
        step = 10 ** math.floor(math.log10((self.high - self.low) / 3))
        step *= min(m for m in (1, 2, 5, 10) if (self.high - self.low) / (m * step) <= 5)
        size = math.floor(math.log10(step * 1.001))
        largest = max(abs(self.low), abs(self.high))
        style = f".{math.floor(math.log10(largest)) - size}e"
        if step >= 1e-4 and largest < 1e6:
            style = f",.{max(0, -size)}f"
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [(k * step, format(k * step, style) if k else "0") for k in range(first, last + 1)]


def chart(name, xs, ys):
    """Return one curve as a <figure>: as logged, smoothed, and with its last value.

    Where steps share a point, the lowest and the highest of them are drawn: no spike is lost.
    """
    across, up = Axis(xs[0], xs[-1], 50, 302), Axis(min(ys), max(ys), 122, 10)
    size = math.ceil(len(ys) / MAX_POINTS)
    buckets = [range(i, min(i + size, len(ys))) for i in range(0, len(ys), size)]
    shapes = grid(across, up)
    extremes = []
    for bucket in buckets:
        extremes += sorted({min(bucket, key=ys.__getitem__), max(bucket, key=ys.__getitem__)})
    shapes.append(polyline("raw", [(across(xs[i]), up(ys[i])) for i in extremes]))
    if len(ys) >= 8:
        means = smoothed(ys, max(4, len(ys) // 20))
        ends = [bucket[-1] for bucket in buckets]
        shapes.append(polyline("smooth", [(across(xs[i]), up(means[i])) for i in ends]))
    # A title is shown under the pointer without a script.
    for i in range(0, len(ys), math.ceil(len(ys) / MAX_DOTS)):
        shapes.append(f"<circle cx={across(xs[i])} cy={up(ys[i])} r=2>"
                      f"<title>step {xs[i]}: {number(ys[i])}</title></circle>")
    return figure(name, number(ys[-1]), "".join(shapes))


def grid(across, up):
    shapes = []
    for value, label in up.ticks():
        y = up(value)
        shapes.append(f"<line class=grid x1=50 x2=302 y1={y} y2={y} />"
                      f"<text x=45 y={y} dy=3 text-anchor=end>{label}</text>")
    for value, label in across.ticks():
        # Steps are whole numbers.
        if value == round(value):
            label = label.removesuffix(".0")
            shapes.append(f"<text x={across(value)} y=136 text-anchor=middle>{label}</text>")
    return shapes


def polyline(kind, points):
    text = " ".join(f"{x},{y}" for x, y in points)
    return f'<polyline class={kind} points="{text}" />'


def smoothed(values, span):
    """Return the mean of the about `span` values around each. A straight line stays where it is."""
    sums = [0.0, *accumulate(values)]
    means = []
    for i in range(len(values)):
        first, last = max(0, i - span // 2), min(len(values), i + span // 2 + 1)
        means.append((sums[last] - sums[first]) / (last - first))
    return means


def figure(name, last, shapes):
    name, unit = escape(name), UNITS.get(name)
    unit = f" <i>{unit}</i>" if unit else ""
    return (f"<figure><figcaption><span><b>{name}</b>{unit}</span><b>{last}</b></figcaption>"
            f'<svg viewBox="0 0 320 152" role=img aria-label="{name}: last {last}">{shapes}'
            "<text x=180 y=149 text-anchor=middle>step</text></svg></figure>")
