"""`stoker` and `python -m stoker`: the command line."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point of both."""
    if sys.argv[1:2] == ["run"] and sys.argv[2:3] not in ([], ["-h"], ["--help"]):
        # Before the command line with its libraries, of which the script may know nothing.
        from stoker.run import run_as_main

        run_as_main(sys.argv[2:])
        return
    from stoker.cli import main as command_line

    command_line()


if __name__ == "__main__":
    main()
