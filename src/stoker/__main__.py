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
    try:
        from stoker.cli import main as command_line
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        # torch or the native engine is broken; that is what `stoker doctor` is for.
        from stoker.doctor import findings
        from stoker.environment import facts_of
        from stoker.finding import as_text, failed

        found = findings(facts_of())
        if not failed(found):
            raise
        if sys.argv[1:2] != ["doctor"]:
            found = [finding for finding in found if finding.state == "fault"]
        sys.exit(f"error: {error}\n{as_text(found)}")
    command_line()


if __name__ == "__main__":
    main()
