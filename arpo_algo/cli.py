"""The ``arpo`` command line: a TOML file plus ``--flag`` overrides become the settings of a command, which then runs."""

from __future__ import annotations

import difflib
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any

import gymnasium
import tyro

from arpo_algo.commands import SFT, CheckEnv, Doctor, Eval, Rollout, Train
from arpo_algo.health import RunStopped
from arpo_algo.policies.pool import EngineLost
from arpo_algo.policies.server_http import ServerError
from arpo_algo.settings import build, flags, read_toml
from arpo_env.core import ForkError

COMMANDS: Mapping[str, type[Any]] = {"train": Train, "sft": SFT, "eval": Eval, "rollout": Rollout, "check-env": CheckEnv, "doctor": Doctor}

USER_ERRORS = (ValueError, OSError, ImportError, ForkError, RunStopped, EngineLost, ServerError, gymnasium.error.Error)
"""What a wrong setting, a wrong environment or a lost engine raises: shown as one message. ARPO_DEBUG=1 shows the traceback."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help"):
        print(_overview())
        return 0 if args else 2
    name, *rest = args
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        print(f"arpo: unknown command {name!r}{f', did you mean {close[0]}?' if close else ''}\n\n{_overview()}", file=sys.stderr)
        return 2
    logging.basicConfig(format="%(message)s")
    logging.getLogger("arpo_algo").setLevel(logging.INFO)  # a resumed run says so
    try:
        parse(name, rest).run()
    except USER_ERRORS as error:
        if os.environ.get("ARPO_DEBUG"):
            raise
        print(f"arpo {name}: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def parse(name: str, args: Sequence[str]) -> Any:
    """The settings of a command: defaults, then its TOML file (a first argument that ends in .toml), then flags."""
    command, args = COMMANDS[name], list(args)
    values = read_toml(args.pop(0)) if args and args[0].endswith(".toml") else {}
    if name == "check-env" and args and not args[0].startswith("-"):
        values["env"] = args.pop(0)
    args = [_spelled(arg, {} if name == "check-env" else SHORTHANDS) for arg in args]
    _choose_type(values, ("trainer", "branching") if name == "train" else ("branching",), args)
    _choose_type(values, ("policy",), args)
    if name == "train":
        args = [arg for given in args for arg in ((given, "True") if given == "--ray" else (given,))]
    required = {f.name: tyro.MISSING for f in fields(command) if f.default is MISSING and f.default_factory is MISSING}
    blank = command(**required)
    # The file is checked by itself, then put before the flags as flags: an object built from the file alone would hold what follows from its values
    # (the length of a schedule from the number of steps), and keep it when a flag changes them.
    said, unsaid = flags(build(command, values, base=blank), values)
    settings = (tyro.conf.AvoidSubcommands, tyro.conf.FlagConversionOff)
    return tyro.cli(command, default=build(command, unsaid, base=blank), args=[*said, *args], prog=f"arpo {name}", config=settings)


SHORTHANDS = {"--tasks": "--env.tasks", "--search-cache": "--env.search-cache", "--env": "--env.id"}


def _spelled(arg: str, shorthands: Mapping[str, str]) -> str:
    flag, equals, value = arg.partition("=")
    return shorthands.get(flag, flag) + equals + value


def _choose_type(values: dict[str, Any], path: tuple[str, ...], args: list[str]) -> None:
    """Move ``--branching NAME`` (or ``--trainer.branching NAME``, ``--policy NAME``) from ``args`` to ``values``; the fields of what is chosen stay flags."""
    chosen = None
    for at in reversed([at for at, arg in enumerate(args) if arg.partition("=")[0] in ("--" + path[-1], "--" + ".".join(path))]):
        chosen = args[at].partition("=")[2] or "".join(args[at + 1 : at + 2])
        del args[at : at + (1 if "=" in args[at] else 2)]
    if chosen is None:
        return
    for key in path[:-1]:
        values = values.setdefault(key, {})
    table = values.get(path[-1], {})
    values[path[-1]] = {**(table if table.get("type") == chosen else {}), "type": chosen}


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  arpo {name:<{width}}  {(command.__doc__ or '').splitlines()[0]}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: arpo COMMAND [CONFIG.toml] [--flag value ...]",
            "",
            *lines,
            "",
            "Flags override the file. `arpo COMMAND --help` lists them; --branching NAME picks a strategy:",
            "  EntropyBranching, TopEntropyBranching, UniformBranching, RandomBranching, LowEntropyBranching, AuthorsBranching, NoBranching",
            "--policy NAME says where tokens are sampled: Transformers, VLLM, Server (train takes the first two).",
        ]
    )
