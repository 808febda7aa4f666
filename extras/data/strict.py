"""JSON that is read strictly: no key twice, no number that is not finite."""
import math
from collections import Counter


def unique(pairs):
    """Return the object of these pairs. Python's reader lets a key that is given twice through."""
    value = dict(pairs)
    if len(value) < len(pairs):
        [(key, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f'key "{key}" twice')
    return value


def finite(text):
    """Return the number that a text spells. Python's reader lets NaN and infinity through."""
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is not a finite number")
    return number


def nothing(constant):
    """Return None for NaN, which pandas writes for what is missing, and for infinity."""
    return None


STRICT = {"object_pairs_hook": unique, "parse_float": finite, "parse_constant": finite}
OF_ROWS = {"parse_constant": nothing}  # a column that nobody reads stops no file
