"""The statistics of the report: intervals of proportions."""
import math

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
