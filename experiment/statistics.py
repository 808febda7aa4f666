"""The statistics of the reports: intervals of proportions, and calibration of probabilities."""
import math
from statistics import fmean

# Two-sided 95 % quantile of the normal distribution.
Z = 1.959964


def wilson(k, n):
    """Return the 95 % interval of a proportion k / n, and (0, 1) for n = 0.

    (p + z^2/2n -+ z sqrt(p (1-p) / n + z^2/4n^2)) / (1 + z^2/n). Wilson 1927. It stays within 0..1
    and has a width at k = 0 and k = n too.
    """
    if not n:
        return 0.0, 1.0
    p, z2 = k / n, Z * Z
    middle = p + z2 / (2 * n)
    half = Z * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    return max(0.0, (middle - half) / (1 + z2 / n)), min(1.0, (middle + half) / (1 + z2 / n))


def difference(k1, n1, k2, n2):
    """Return p2 - p1 and the bounds of its 95 % interval, for two independent samples.

    Newcombe 1998 (the paper on two proportions), method 10, from Wilson's l and u:
    (d - sqrt((p2 - l2)^2 + (u1 - p1)^2), d + sqrt((u2 - p2)^2 + (p1 - l1)^2)).
    """
    p1, p2 = k1 / n1, k2 / n2
    low1, high1 = wilson(k1, n1)
    low2, high2 = wilson(k2, n2)
    low = p2 - p1 - math.hypot(p2 - low2, high1 - p1)
    high = p2 - p1 + math.hypot(high2 - p2, p1 - low1)
    return p2 - p1, low, high


def brier(pairs):
    """Return the mean of (probability - outcome)^2 for outcomes 0 or 1.

    0 is best, and 0.25 is what always saying 0.5 gets.
    """
    return fmean((p - y) ** 2 for p, y in pairs)


def bins(pairs, count=10):
    """Sort (probability, ...) tuples into bins of equal width; 1.0 is in the last."""
    result = [[] for _ in range(count)]
    for pair in pairs:
        result[min(int(pair[0] * count), count - 1)].append(pair)
    return result


def calibration_error(pairs):
    """Return the ECE with 10 bins: sum of n_b / N |mean probability - share of outcomes 1|.

    arXiv 1706.04599, eq. 3. The paper's confidence is that of the predicted class. Here it is the
    probability stated of outcome 1.
    """
    return sum(abs(sum(p - y for p, y in group)) for group in bins(pairs)) / len(pairs)
