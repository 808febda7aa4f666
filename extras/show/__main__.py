"""python -m extras.show --metrics: what every logged number means."""
import argparse

from extras.show.metrics import print_metrics


def program():
    """Print what the command line asks for."""
    parser = argparse.ArgumentParser("python -m extras.show", allow_abbrev=False)
    parser.add_argument("--metrics", action="store_true", required=True,
                        help="print what every logged number means")
    parser.parse_args()
    print_metrics()


if __name__ == "__main__":
    program()
