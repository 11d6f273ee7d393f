"""``arpo`` and ``python -m arpo_algo``: the command line, or one line that says what is missing for it."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command line; returns the exit status."""
    try:
        from arpo_algo.cli import main as run
    except ModuleNotFoundError as error:
        if sys.argv[1:2] == ["doctor"]:
            from arpo_algo.doctor import report

            print(report())
            return 0
        print(f"arpo: the command line needs {error.name}: pip install 'arpo[train]'", file=sys.stderr)
        return 1
    return run()


if __name__ == "__main__":
    sys.exit(main())
