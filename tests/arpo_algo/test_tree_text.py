"""A rollout tree as text, against a tree drawn by hand."""

from __future__ import annotations

import unicodedata

import pytest

from arpo_algo.entropy import EntropyBounds
from arpo_algo.tree import Decision, RolloutTree, Trajectory
from arpo_algo.tree_text import print_tree

GOLDEN = """\
group 3 task w-1: 3 trajectories (2 initial, 1 branched), 2 branch points, 1 branched, 24 unique tokens of 37
0 prompt  4 tok  “Who founded Arl, and when?”
├─ 1 policy  3 tok  H 0.20  “<search>Arl</search>”
│  2 search  2 tok  ◆ dH +0.400 = 0.600 - 0.200 nats, score 0.500, branch 1 (P=0.500 > 0.3)  “Two places are c…”
│  ├─ 3 policy  5 tok  H 0.60  ● t0 initial: reward 1.1 (accuracy 1 tool_bonus 0.1) answer “Bel” answered
│  └─ 4 policy  2 tok  H 1.00  ● t2 branched at 2: unscored env_error
└─ 5 policy  1 tok  H 0.40  “<python>1+1</python>”
   6 python  3 tok  ◆ dH -0.300 = 0.100 - 0.400 nats, score -0.200, no branch (P=-0.200 <= 0.3)  “2”
   7 policy  4 tok  H 0.10  ● t1 initial: reward -1 max_turns  “two”"""


def policy(tree: RolloutTree, parent: int, entropies: list[float], text: str) -> None:
    tree.add(parent, "policy", [1] * len(entropies), logprobs=[0.0] * len(entropies), entropies=entropies, text=text)


def small_tree() -> RolloutTree:
    tree = RolloutTree(task_id="w-1", group=3)
    tree.add(None, "prompt", [9] * 4, text="Who founded Arl, and when?")
    policy(tree, 0, [0.1, 0.2, 0.3], "<search>Arl</search>")
    tree.add(1, "observation", [7, 7], tools=("search",), text="Two places are called Arl: one in the north, one in the south.")
    policy(tree, 2, [0.6] * 5, "<answer>\n\\boxed{Bel}</answer>")
    policy(tree, 2, [1.0, 1.0], "")
    policy(tree, 0, [0.4], "<python>1+1</python>")
    tree.add(5, "observation", [7, 7, 7], tools=("python",), text="2")
    policy(tree, 6, [0.1] * 4, "two")
    parts = {"accuracy": 1.0, "tool_bonus": 0.1}
    tree.trajectories = [
        Trajectory(tree=tree, index=0, origin="initial", leaf=3, reward=1.1, reward_parts=parts, answer="Bel", stop_reason="answered"),
        Trajectory(tree=tree, index=1, origin="initial", leaf=7, reward=-1.0, stop_reason="max_turns"),
        Trajectory(tree=tree, index=2, origin="branched", branched_from=2, parent=0, leaf=4, scored=False, stop_reason="env_error"),
    ]
    tree.decisions = [
        Decision(node=2, trajectory=0, depth=1, initial_entropy=0.2, entropy=0.6, score=0.5, children=1, reason="P=0.500 > 0.3"),
        Decision(node=6, trajectory=1, depth=1, initial_entropy=0.4, entropy=0.1, score=-0.2, reason="P=-0.200 <= 0.3"),
    ]
    return tree


def columns(line: str) -> int:
    return sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in line)


def test_the_tree_reads_as_drawn_by_hand() -> None:
    assert print_tree(small_tree(), width=112) == GOLDEN


def test_estimates_and_decisions_that_they_leave_open_are_marked() -> None:
    tree = small_tree()
    tree.nodes[1].bounds = EntropyBounds(lower=(0.1,) * 3, upper=(0.4,) * 3, covered=(0.9,) * 3)
    tree.decisions[0].settled = tree.decisions[1].settled = False
    lines = print_tree(tree, width=400).splitlines()
    assert "1 policy  3 tok  H ~0.20" in lines[2] and "H 0.60" in lines[4]
    assert "branch 1, not settled (P=0.500 > 0.3)" in lines[3] and "no branch, not settled (P=" in lines[7]


@pytest.mark.parametrize("width", [20, 60, 112, 160])
def test_no_line_is_wider_than_asked_and_none_is_lost(width: int) -> None:
    tree = small_tree()
    tree.nodes[0].text = "東京は日本の首都です" * 50
    tree.nodes[6].text = "x" * 1_000_000
    lines = print_tree(tree, width=width).splitlines()
    assert len(lines) == 9
    assert max(map(columns, lines)) <= width


def test_no_text_of_the_tree_reaches_the_terminal_unescaped() -> None:
    hostile = "\x1b[2J\x07\r\n\u202e\u200b\ud800\x9b"
    tree = small_tree()
    tree.task_id = hostile
    tree.nodes[0].text = tree.nodes[2].text = tree.nodes[3].text = hostile
    tree.nodes[2].tools = (hostile,)
    tree.decisions[0].reason = hostile
    tree.trajectories[0].answer = tree.trajectories[0].stop_reason = hostile
    tree.trajectories[0].reward_parts = {hostile: 1.0}
    text = print_tree(tree, width=400)
    assert all(char.isprintable() for char in text.replace("\n", ""))
    assert len(text.splitlines()) == 9
    assert r"“\x1b[2J\x07\r\n\u202e\u200b\ud800\x9b”" in text


def test_a_long_chain_stays_in_its_lane_and_does_not_recurse() -> None:
    tree = RolloutTree()
    tree.add(None, "prompt", [1])
    for parent in range(3000):
        tree.add(parent, "observation", [1])
    tree.trajectories = [Trajectory(tree=tree, index=0, origin="initial", leaf=3000)]
    lines = print_tree(tree).splitlines()
    assert len(lines) == 3002
    assert lines[-1] == "3000 observation  1 tok  ● t0 initial: reward 0"


def test_an_empty_tree_is_one_line() -> None:
    assert print_tree(RolloutTree()) == "group 0 task -: 0 trajectories (), 0 branch points, 0 branched, 0 unique tokens of 0"
