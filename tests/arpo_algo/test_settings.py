"""Settings from TOML: what builds, what is refused and in which words, and the same values as flags."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from arpo_algo.branching import EntropyBranching, TopEntropyBranching
from arpo_algo.config import ARPOConfig
from arpo_algo.settings import SettingsError, build, flags, read_toml


@dataclass(frozen=True, kw_only=True)
class Square:
    side: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Circle:
    radius: float
    filled: bool = False


@dataclass(frozen=True, kw_only=True)
class Drawing:
    title: str = "untitled"
    shape: Square | Circle = field(default_factory=Square)
    frame: Circle = field(default_factory=lambda: Circle(radius=7.0))
    size: tuple[int, int] = (2, 3)
    tags: tuple[str, ...] = ()
    mode: Literal["ink", "oil"] = "ink"
    out: Path | None = None
    extra: dict[str, Any] = field(default_factory=dict)


def test_every_kind_of_field() -> None:
    values = {
        "title": "a", "shape": {"type": "Circle", "radius": 2}, "size": [4, 5], "tags": ["x", "y", "z"], "mode": "oil", "out": "b/c", "extra": {"k": [1]},
    }  # fmt: skip
    assert build(Drawing, values) == Drawing(
        title="a", shape=Circle(radius=2.0), size=(4, 5), tags=("x", "y", "z"), mode="oil", out=Path("b/c"), extra={"k": [1]}
    )


def test_a_table_changes_only_what_it_names() -> None:
    """The frame has radius 7 by default though its class has no default; naming the colour alone must not ask for a radius."""
    assert build(Drawing, {"frame": {"filled": True}}).frame == Circle(radius=7.0, filled=True)
    base = Drawing(title="kept", shape=Circle(radius=3.0))
    assert build(Drawing, {"shape": {"filled": True}}, base=base) == dataclasses.replace(base, shape=Circle(radius=3.0, filled=True))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"titel": "a"}, "unknown key titel; did you mean title?"),
        ({"frame": {"radus": 1}}, "unknown key frame.radus; did you mean radius?"),
        ({"q": 1}, "unknown key q; known keys: title, shape"),
        ({"title": 3}, "title must be str, got 3"),
        ({"frame": {"radius": "3"}}, "frame.radius must be float, got '3'"),
        ({"frame": {"filled": 1}}, "frame.filled must be bool, got 1"),
        ({"size": [1]}, "size must be"),
        ({"size": [True, False]}, "size must be"),
        ({"mode": "chalk"}, "mode must be one of 'ink', 'oil', got 'chalk'"),
        ({"out": 3}, "out must be Path or nothing, got 3"),
        ({"shape": {"type": "Triangle"}}, "shape.type must be one of Square, Circle, got 'Triangle'"),
        ({"shape": {"type": "Circle"}}, "radius"),
        ({"frame": 3}, "frame must be Circle, got 3"),
    ],
)
def test_what_does_not_fit(values: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        build(Drawing, values)
    assert message in str(caught.value)


def test_a_check_of_the_settings_names_its_table() -> None:
    with pytest.raises(SettingsError, match=r"\[trainer\.rollout\]: initial must be in \[1, group_size=4\], got 5"):
        build(dataclasses.make_dataclass("Run", [("trainer", ARPOConfig, field(default_factory=ARPOConfig))]), {"trainer": {"rollout": _group(4, 5)}})


def _group(size: int, initial: int) -> dict[str, Any]:
    return {"group_size": size, "initial": initial}


def test_the_strategy_of_a_table_without_type_is_the_default() -> None:
    assert build(ARPOConfig, {"branching": {"children": 2}}).branching == EntropyBranching(children=2)
    assert build(ARPOConfig, {"branching": {"type": "TopEntropyBranching", "children": 2}}).branching == TopEntropyBranching(children=2)
    with pytest.raises(SettingsError, match=r"unknown key branching\.tau"):
        build(ARPOConfig, {"branching": {"type": "TopEntropyBranching", "tau": 1.0}})


def test_values_as_flags() -> None:
    values = {"title": "a b", "shape": {"type": "Circle", "radius": 2}, "size": [4, 5], "frame": {"filled": True}, "extra": {"k": 1}}
    said, unsaid = flags(build(Drawing, values), values)
    assert said == ["--title=a b", "--shape.radius=2", "--size", "4", "5", "--frame.filled=True"]
    assert unsaid == {"shape": {"type": "Circle"}, "frame": {}, "extra": {"k": 1}}


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"no such configuration file: .*absent\.toml"):
        read_toml(tmp_path / "absent.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("a = \n")
    with pytest.raises(SettingsError, match=r"broken\.toml is not valid TOML: .*line 1"):
        read_toml(broken)
