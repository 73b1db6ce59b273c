"""Where the command begins, also as `python -m sparsedeploy`: loading the rest takes a third of a second, and may be interrupted too."""

from __future__ import annotations

import os
import signal
import sys

INTERRUPTED = 130


def main() -> None:
    """Load the command line and run it."""
    # Ctrl-C while modules load would end in a traceback, or be swallowed by a library that tries imports.
    own = (
        signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )  # in the background of a script it is ignored: stay so
    if own:
        signal.signal(signal.SIGINT, _leave)
    from sparsedeploy import cli

    if own:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    cli.main()


def _leave(*_: object) -> None:
    print("sparsedeploy: Interrupted before anything was begun.", file=sys.stderr, flush=True)
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()
