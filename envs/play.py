"""Where this program has moved."""
import sys

sys.exit("it is now: python -m extras.play NAME")
