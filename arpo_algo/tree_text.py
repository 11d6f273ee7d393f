"""A rollout tree as text: one line a node, a lane a branch, and at each branch point why it branched or did not."""

from __future__ import annotations

import unicodedata
from collections import Counter

from arpo_algo.tree import Decision, Node, RolloutTree, Trajectory


def print_tree(tree: RolloutTree, *, width: int = 160) -> str:
    """The tree as lines of at most ``width`` terminal columns, without a newline at the end.

    A policy line shows its number of tokens and their mean entropy H in nats (``~``: an estimate); an observation line the decision taken after it (entropy
    before and after, their difference dH, score, reason, branches started); the last line of a trajectory its reward and why it stopped. Nodes with one child
    go on in the same lane. Text is cut to what is left of the line; characters that a terminal would obey are escaped.
    """
    children = [ids for _, ids in tree.children()]
    decisions: dict[int, list[Decision]] = {}
    for decision in tree.decisions:
        decisions.setdefault(decision.node, []).append(decision)
    leaves: dict[int, list[Trajectory]] = {}
    for trajectory in tree.trajectories:
        leaves.setdefault(trajectory.leaf, []).append(trajectory)
    lines = [_cut(_header(tree), width)]
    pending = [(0, "", "")] if tree.nodes else []  # node, what stands before it, what stands before its descendants
    while pending:
        index, before, lane = pending.pop()
        node = tree.nodes[index]
        lines.append(_line(node, before, decisions.get(index, []), leaves.get(index, []), width))
        below = children[index]
        if len(below) == 1:
            pending.append((below[0], lane, lane))
        else:
            marks = [("├─ ", "│  ")] * (len(below) - 1) + [("└─ ", "   ")]
            pending += [(child, lane + mark, lane + rest) for child, (mark, rest) in zip(below, marks[: len(below)], strict=True)][::-1]
    return "\n".join(lines)


def _header(tree: RolloutTree) -> str:
    origins = Counter(trajectory.origin for trajectory in tree.trajectories)
    split = ", ".join(f"{count} {origin}" for origin, count in origins.items())
    branched = sum(decision.children > 0 for decision in tree.decisions)
    return (
        f"group {tree.group} task {_escape(tree.task_id) or '-'}: {len(tree.trajectories)} trajectories ({split}), "
        f"{len(tree.decisions)} branch points, {branched} branched, {tree.unique_tokens} unique tokens of {tree.total_tokens}"
    )


def _line(node: Node, before: str, decisions: list[Decision], leaves: list[Trajectory], width: int) -> str:
    name = ",".join(node.tools) if node.tools else node.role
    facts = [f"{len(node.token_ids)} tok"]
    if node.entropies:
        facts.append(f"H {'' if node.bounds is None else '~'}{sum(node.entropies) / len(node.entropies):.2f}")
    facts += [_decision(decision) for decision in decisions] + [_leaf(trajectory) for trajectory in leaves]
    head = f"{before}{node.id} {_escape(name)}  {'  '.join(facts)}"
    room = width - _columns(head) - 4  # two spaces, two quotation marks
    return _cut(head, width) if room < 8 or not node.text else f"{head}  “{_excerpt(node.text, room)}”"


def _decision(decision: Decision) -> str:
    verdict = f"branch {decision.children}" if decision.children else "no branch"
    verdict += "" if decision.settled else ", not settled"
    reason = f" ({_escape(decision.reason)})" if decision.reason else ""
    return f"◆ dH {decision.delta:+.3f} = {decision.entropy:.3f} - {decision.initial_entropy:.3f} nats, score {decision.score:.3f}, {verdict}{reason}"


def _leaf(trajectory: Trajectory) -> str:
    parts = " ".join(f"{_escape(name)} {value:g}" for name, value in trajectory.reward_parts.items())
    reward = f"reward {trajectory.reward:g}{f' ({parts})' if parts else ''}" if trajectory.scored else "unscored"
    origin = trajectory.origin if trajectory.branched_from is None else f"{trajectory.origin} at {trajectory.branched_from}"
    answer = f" answer “{_excerpt(trajectory.answer, 24)}”" if trajectory.answer else ""
    return f"● t{trajectory.index} {origin}: {reward}{answer} {_escape(trajectory.stop_reason)}".rstrip()


def _escape(text: str) -> str:
    """The text with line ends, control, bidirectional and other invisible characters as escapes."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)


def _columns(text: str) -> int:
    """Terminal columns: two for a wide character, none for a combining mark."""
    return sum(map(_char_columns, text))


def _char_columns(char: str) -> int:
    if unicodedata.combining(char) or unicodedata.category(char) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def _cut(text: str, columns: int) -> str:
    """The text, its end replaced by an ellipsis where it is wider than ``columns``."""
    if _columns(text) <= columns:
        return text
    used = 0
    for end, char in enumerate(text):
        used += _char_columns(char)
        if used > columns - 1:
            return text[:end] + "…"
    return text


def _excerpt(text: str, columns: int) -> str:
    """The beginning of a text that may be a megabyte long, escaped and cut."""
    return _cut(_escape(text[: columns + 1]), columns)
