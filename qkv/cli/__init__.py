"""Command line of qkv.

This module imports nothing, so that Ctrl-C ends quietly from the first moment, while the other modules are imported.
"""

from __future__ import annotations

import sys

INTERRUPT_CODE = 130  # the exit code of a shell for Ctrl-C
_RESUMABLE = {"train", "sweep", "data"}  # commands that continue if they are run again


def main() -> None:
    """Run the command line."""
    try:
        from qkv.cli.entry import run

        run()
    except KeyboardInterrupt:
        hint = "; run the same command again to resume from the last checkpoint" if _RESUMABLE & set(sys.argv) else ""
        print(f"qkv: interrupted{hint}", file=sys.stderr)
        sys.exit(INTERRUPT_CODE)
