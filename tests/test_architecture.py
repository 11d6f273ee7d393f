"""Which package may import what."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEAVY = {
    "torch", "transformers", "vllm", "ray", "e2b", "e2b_code_interpreter", "pydantic_monty", "httpx", "httpx2", "mcp", "ddgs", "trafilatura", "datasets",
    "pyarrow", "tantivy", "pydantic", "math_verify", "sympy", "trl", "reasoning_gym", "gem", "skyrl_gym", "textarena", "fastapi", "uvicorn",
}  # fmt: skip
SHELL = {"commands.py", "doctor.py"}
"""The command line stands outside the algorithm: it runs the conformance kit and asks how code is isolated."""


def imports(path: Path, *, top_level: bool = False) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = tree.body if top_level else list(ast.walk(tree))
    found = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return found | {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}


def test_the_algorithm_knows_no_concrete_environment_or_tool() -> None:
    for path in (ROOT / "arpo_algo").rglob("*.py"):
        known = {name for name in imports(path) if name.split(".")[0] == "arpo_env"}
        if path.name not in SHELL:
            assert known <= {"arpo_env.core", "arpo_env.task"}, f"{path.name} imports {known}"


def test_environments_know_nothing_of_the_algorithm_and_load_nothing_heavy() -> None:
    for path in (ROOT / "arpo_env").rglob("*.py"):
        roots = {name.split(".")[0] for name in imports(path)}
        assert not roots & {"arpo_algo", "torch", "transformers", "vllm"}, f"{path.name} imports {roots}"
        assert not {name.split(".")[0] for name in imports(path, top_level=True)} & HEAVY, f"{path.name} imports something heavy at the top"
