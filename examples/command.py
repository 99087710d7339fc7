"""The command line that all examples share. This is not an example: read the others."""

import argparse
import io
import os
import sys
from collections.abc import Callable


def command(doc: str | None, backend: bool = True) -> argparse.ArgumentParser:
    """A parser whose help is the first line of an example, with --backend if its arrays may live on a GPU."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    if backend:
        where = "where arrays live: numpy, the default, or cupy, on a GPU"
        parser.add_argument("--backend", default="numpy", choices=("numpy", "cupy"), help=where)
    return parser


def run(main: Callable[..., None], parser: argparse.ArgumentParser) -> None:
    """Calls main with the options. If something is missing, such as a GPU, exits with 2 and an error message."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal or a file that cannot hold a θ gets a ?
    options = vars(parser.parse_args())
    try:
        main(**options)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as head, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ImportError, RuntimeError, ValueError) as error:  # no CuPy, no device, an option out of range
        parser.error(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
