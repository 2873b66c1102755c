"""`stoker` and `python -m stoker`: the command line."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point of both."""
    # Scripts run before the command line with its libraries, of which they may know nothing.
    if sys.argv[1:2] == ["run"] and sys.argv[2:3] not in ([], ["-h"], ["--help"]):
        from stoker.run import run_as_main

        run_as_main(sys.argv[2:])
        return
    if sys.argv[1:2] == ["diagnose"] and "--" in sys.argv[2:]:
        from stoker.watched import run_watched

        at = sys.argv.index("--")
        run_watched(sys.argv[2:at], sys.argv[at + 1 :])
        return
    from stoker.cli import main as command_line

    command_line()


if __name__ == "__main__":
    main()
