"""The page of a run. It has moved: python -m extras.show RUN..."""
import sys

from extras.show.__main__ import program

if __name__ == "__main__":
    print(__doc__, file=sys.stderr)
    program()
