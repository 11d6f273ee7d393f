"""Prints the longest files and functions; fails where one has outgrown the limits. Run by ``make lint``."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

MAX_FILE, MAX_FUNCTION = 520, 75
ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    files: list[tuple[int, str]] = []
    functions: list[tuple[int, str]] = []
    for path in sorted(p for package in ("arpo_env", "arpo_algo") for p in (ROOT / package).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        name = str(path.relative_to(ROOT))
        files.append((text.count("\n"), name))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                functions.append(((node.end_lineno or node.lineno) - node.lineno + 1, f"{name}:{node.name}"))
    for title, found in (("files", files), ("functions", functions)):
        print(f"longest {title}: " + ", ".join(f"{name} {size}" for size, name in sorted(found, reverse=True)[:5]))
    large = [name for limit, found in ((MAX_FILE, files), (MAX_FUNCTION, functions)) for size, name in found if size > limit]
    if large:
        print(f"too long (files {MAX_FILE}, functions {MAX_FUNCTION} lines): {', '.join(large)}")
    return 1 if large else 0


if __name__ == "__main__":
    sys.exit(main())
