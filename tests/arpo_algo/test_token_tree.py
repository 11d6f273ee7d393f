"""The packed token tree against a slow reference: the set of all prefixes of all rows, one after another."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arpo_algo.distributed import Ranks
from arpo_algo.packing import Rows, tree_micro_batches, unique_tokens
from arpo_algo.sharding import rank_micro_batches
from arpo_algo.token_tree import TokenTree, build_tree, in_all, partition, sharing

Prefix = tuple[int, ...]
ROWS = st.lists(st.lists(st.integers(0, 2), max_size=7), min_size=1, max_size=8)
"""Three ids, so that rows share, repeat and continue each other; some are empty. Id 0 is also what padding holds."""
GROUPS = st.lists(ROWS, min_size=1, max_size=4)
bounded = settings(max_examples=60, deadline=None, derandomize=True, database=None)


def padded(rows: list[list[int]], filler: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """The rows as ``token_ids`` (R, T) and ``lengths`` (R,); what stands in the padding must not matter."""
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    token_ids = np.full((len(rows), max(lengths, default=0)), filler, dtype=np.int64)
    for number, row in enumerate(rows):
        token_ids[number, : len(row)] = row
    return token_ids, lengths


def prefixes(rows: list[list[int]]) -> set[Prefix]:
    return {tuple(row[:length]) for row in rows for length in range(1, len(row) + 1)}


def prefix_of_index(tree: TokenTree) -> list[Prefix]:
    """What stands on the path to each packed token, from the ids and parents alone."""
    paths: list[Prefix] = []
    for token, parent in zip(tree.token_ids.tolist(), tree.parents.tolist(), strict=True):
        assert parent < len(paths), "a parent stands before its children"
        paths.append(((*paths[parent],) if parent >= 0 else ()) + (token,))
    return paths


def in_common(left: list[int], right: list[int]) -> int:
    return len(prefixes([left]) & prefixes([right]))


# ---- build_tree


@bounded
@given(ROWS, st.integers(0, 2))
def test_each_prefix_is_one_token_that_sees_its_own_prefixes(rows, filler):
    tree = build_tree(*padded(rows, filler))
    paths = prefix_of_index(tree)
    assert len(tree) == len(paths) == len(set(paths)) and set(paths) == prefixes(rows)
    assert tree.depths.tolist() == [len(path) - 1 for path in paths]
    for number, row in enumerate(rows):
        assert [paths[index] for index in tree.where[number, : len(row)]] == [tuple(row[: column + 1]) for column in range(len(row))]
        assert not tree.where[number, len(row) :].any()
    for k, key in enumerate(paths):
        seen_from = [q for q in range(len(tree)) if k <= q < tree.ends[k]]
        assert seen_from == [q for q, query in enumerate(paths) if query[: len(key)] == key]


@bounded
@given(ROWS)
def test_without_sharing_each_row_is_a_chain_of_its_own(rows):
    tree = build_tree(*padded(rows), share=False)
    assert len(tree) == sum(map(len, rows))
    used = [index for number, row in enumerate(rows) for index in tree.where[number, : len(row)].tolist()]
    assert sorted(used) == list(range(len(tree)))
    for number, row in enumerate(rows):
        own = tree.where[number, : len(row)]
        assert tree.token_ids[own].tolist() == row and tree.depths[own].tolist() == list(range(len(row)))
        assert tree.parents[own].tolist() == [-1, *own.tolist()][: len(row)]
        assert tree.ends[own].tolist() == [own[-1] + 1 for _ in row]
    assert [stop - start for start, stop, _ in tree.nodes.tolist()] == [len(row) for row in sorted(rows) if row]


@bounded
@given(ROWS, st.booleans())
def test_nodes_are_the_longest_runs_without_a_branch(rows, share):
    tree = build_tree(*padded(rows), share=share)
    children = [tree.parents.tolist().count(index) for index in range(len(tree))]
    assert np.concatenate([np.arange(start, stop) for start, stop, _ in tree.nodes] or [[]]).tolist() == list(range(len(tree)))
    for start, stop, end in tree.nodes.tolist():
        assert stop > start and end == tree.ends[start] == tree.ends[stop - 1]
        assert all(tree.parents[index] == index - 1 and children[index - 1] == 1 for index in range(start + 1, stop))
        assert tree.parents[start] < 0 or children[tree.parents[start]] > 1
        assert children[stop - 1] != 1


def test_the_tree_of_three_rows_by_hand():
    # a b c d, a b x and a b x y: the second is a prefix of the third. Given in another order, with one of them twice.
    a, b, c, d, x, y = range(10, 16)
    tree = build_tree(*padded([[a, b, x, y], [a, b, c, d], [a, b, x], [a, b, c, d]]))
    assert tree.token_ids.tolist() == [a, b, c, d, x, y]
    assert tree.depths.tolist() == [0, 1, 2, 3, 2, 3] and tree.parents.tolist() == [-1, 0, 1, 2, 1, 4] and tree.ends.tolist() == [6, 6, 4, 4, 6, 6]
    assert tree.where.tolist() == [[0, 1, 4, 5], [0, 1, 2, 3], [0, 1, 4, 0], [0, 1, 2, 3]]
    assert tree.nodes.tolist() == [[0, 2, 6], [2, 4, 4], [4, 6, 6]]


@pytest.mark.parametrize("rows", [[], [[]], [[], []]])
def test_rows_without_tokens_are_an_empty_tree(rows):
    tree = build_tree(*padded(rows))
    assert len(tree) == 0 and tree.nodes.shape == (0, 3) and tree.where.shape == (len(rows), 0)
    shared = sharing(*padded(rows), np.zeros((len(rows), 0), dtype=bool))
    assert (shared.tokens, shared.pairs, shared.targets, shared.unique_tokens, shared.unique_pairs, shared.unique_targets) == (1.0, 1.0, 1.0, 0, 0, 0)
    assert sorted(np.concatenate([*partition(*padded(rows), 4), np.zeros(0)]).tolist()) == list(range(len(rows)))


def test_ids_are_ordered_as_numbers_and_large_ones_are_kept():
    # 255, 256 and 65536 in the order of their bytes from the low end would be 256, 65536, 255.
    rows = [[7, 65536], [7, 255], [7, 256], [151_935], [2**31]]
    tree = build_tree(*padded(rows))
    assert tree.token_ids.tolist() == [7, 255, 256, 65536, 151_935, 2**31]


def test_a_turn_rendered_in_two_ways_parts_where_the_ids_do():
    # Both are " Pantom"; what follows is equal text and equal ids, but after different tokens: nothing of it may be shared.
    rows = [[1, 53122, 316, 8, 9], [1, 393, 30002, 8, 9]]
    tree = build_tree(*padded(rows))
    assert len(tree) == 9 and tree.nodes.tolist() == [[0, 1, 9], [1, 5, 5], [5, 9, 9]]


# ---- sharing


def test_sharing_by_hand():
    # a b c d, a b x, a b x y; trained: d, x, x y of the rows, x being the same token in both.
    token_ids, lengths = padded([[1, 2, 3, 4], [1, 2, 5], [1, 2, 5, 6]])
    mask = np.array([[0, 0, 0, 1], [0, 0, 1, 0], [0, 0, 1, 1]], dtype=bool)
    shared = sharing(token_ids, lengths, mask)
    assert (shared.unique_tokens, shared.unique_pairs, shared.unique_targets) == (6, 1 + 2 + 3 + 4 + 3 + 4, 3)
    assert (shared.tokens, shared.pairs, shared.targets) == (11 / 6, (10 + 6 + 10) / 17, 4 / 3)
    apart = sharing(*padded([[1, 2], [3]]), np.array([[0, 1], [0, 0]], dtype=bool))
    assert (apart.tokens, apart.pairs, apart.targets) == (1, 1, 1)


@bounded
@given(ROWS)
def test_sharing_counts_tokens_pairs_and_targets(rows):
    token_ids, lengths = padded(rows)
    mask = (np.arange(token_ids.shape[1]) < lengths[:, None]) & (token_ids == 1)
    shared, unique = sharing(token_ids, lengths, mask), prefixes(rows)
    assert shared.unique_tokens == len(unique) and shared.unique_pairs == sum(map(len, unique))
    assert shared.unique_targets == sum(path[-1] == 1 for path in unique)
    assert shared.tokens * len(unique) == pytest.approx(sum(map(len, rows)))
    assert shared.pairs * shared.unique_pairs == pytest.approx(sum(len(row) * (len(row) + 1) / 2 for row in rows if unique))
    assert shared.targets * shared.unique_targets == pytest.approx(sum(row.count(1) for row in rows))


# ---- cutting


@bounded
@given(ROWS, st.integers(1, 12), st.booleans())
def test_bins_cover_each_row_once_and_repeat_only_the_path_to_the_cut(rows, max_tokens, share):
    bins = partition(*padded(rows), max_tokens, share=share)
    order = np.concatenate(bins).tolist()
    assert sorted(order) == list(range(len(rows)))
    assert [rows[row] for row in order] == sorted(rows)
    sizes = [len(prefixes(part)) if share else sum(map(len, part)) for part in ([rows[row] for row in bin_] for bin_ in bins)]
    assert all(size <= max_tokens or size == len(rows[bin_[0]]) for size, bin_ in zip(sizes, bins, strict=True))  # one long row, and its copies
    cuts = [(rows[before[-1]], rows[after[0]]) for before, after in itertools.pairwise(bins)]
    whole = len(prefixes(rows)) if share else sum(map(len, rows))
    assert sum(sizes) == whole + (sum(in_common(*cut) for cut in cuts) if share else 0)
    for size, (before, after) in zip(sizes, cuts, strict=False):  # no bin is left before it is full
        assert size + len(after) - (in_common(before, after) if share else 0) > max_tokens


def groups_of(groups: list[list[list[int]]]) -> Rows:
    """Rows of several groups, each beginning with a token of its own, every sampled token of weight 1."""
    rows = [[100 + number, *row] for number, group in enumerate(groups) for row in group]
    token_ids, lengths = padded(rows)
    attention = np.arange(token_ids.shape[1]) < lengths[:, None]
    zeros = np.zeros(token_ids.shape, dtype=np.float32)
    mask = attention & (np.arange(token_ids.shape[1]) > 0)
    numbers = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    return Rows(token_ids=token_ids, attention=attention, mask=mask, old_logprobs=zeros, advantages=zeros, weights=mask.astype(np.float32), groups=numbers)


@bounded
@given(GROUPS, st.integers(1, 30), st.booleans())
def test_micro_batches_hold_whole_groups_where_these_fit(groups, max_tokens, share):
    rows = groups_of(groups)
    batches = tree_micro_batches(rows, max_tokens, share=share)
    assert sorted(np.concatenate(list(itertools.chain(*batches))).tolist()) == list(range(len(rows)))
    sizes = [unique_tokens(rows.select(index), share=share) for index in itertools.chain(*batches)]
    assert all(size <= max_tokens or size == rows.lengths[index[0]] for size, index in zip(sizes, itertools.chain(*batches), strict=True))
    for number in range(len(groups)):
        of_group = np.flatnonzero(rows.groups == number)
        (pieces,) = [pieces for pieces in batches if np.isin(of_group, np.concatenate(pieces)).any()]
        if unique_tokens(rows.select(of_group), share=share) <= max_tokens:
            assert len(pieces) == 1 and np.isin(of_group, pieces[0]).all()
        else:
            assert sorted(np.concatenate(pieces).tolist()) == of_group.tolist()
    largest = [max(unique_tokens(rows.select(np.flatnonzero(rows.groups == number)), share=share) for number in rows.groups[pieces[0]]) for pieces in batches]
    assert largest == sorted(largest, reverse=True)


def test_a_group_is_cut_between_neighbours_of_its_tree():
    # 1 2 3 | 1 2 4 | 1 5 6 and one token in front: 7 unique tokens. In 5 go the two that share most; the third repeats the first two tokens.
    rows = groups_of([[[1]], [[1, 5, 6], [1, 2, 3], [1, 2, 4]]])

    def cut(most: int) -> list[list[list[int]]]:
        return [[piece.tolist() for piece in pieces] for pieces in tree_micro_batches(rows, most)]

    assert cut(9) == [[[1, 2, 3, 0]]]
    assert cut(7) == [[[1, 2, 3]], [[0]]]
    assert cut(5) == [[[2, 3], [1]], [[0]]]
    assert cut(1) == [[[2], [3], [1]], [[0]]]
    three = groups_of([[[1]], [[1]], [[1]]])  # two tokens each
    assert [[piece.tolist() for piece in pieces] for pieces in tree_micro_batches(three, 5)] == [[[0, 1]], [[2]]]


@bounded
@given(GROUPS, st.integers(1, 20), st.integers(1, 4), st.sampled_from(["tree", "packed", "padded"]))
def test_ranks_share_the_rows_and_have_equally_many_micro_batches(groups, max_tokens, size, layout):
    rows = groups_of(groups)
    of_rank = [rank_micro_batches(rows, max_tokens, Ranks(rank=rank, size=size), layout=layout) for rank in range(size)]
    assert len({len(batches) for batches in of_rank}) == 1
    assert size == 1 or {len(pieces) for batches in of_rank for pieces in batches} == {1}
    everything = [index for batches in of_rank for pieces in batches for index in pieces]
    assert sorted(np.concatenate(everything).tolist()) == list(range(len(rows)))
    assert all(len(index) == 0 or computed(rows.select(index), layout) <= max(max_tokens, rows.lengths[index[0]]) for index in everything)


def test_three_equal_groups_are_halved_between_two_ranks():
    rows = groups_of([[[1, *range(100 * row, 100 * row + 10)] for row in range(1, 9)]] * 3)  # 82 unique tokens each
    of_rank = [rank_micro_batches(rows, 1000, Ranks(rank=rank, size=2), layout="tree") for rank in range(2)]
    first, second = ([unique_tokens(rows.select(index)) for (index,) in batches if len(index)] for batches in of_rank)
    assert sum(first) + sum(second) <= 246 + 3 * 2, "each group is cut once at most, and repeats two tokens where it is"
    assert max(sum(first), sum(second)) <= 1.1 * 123, "whole groups would be 164 and 82"


def computed(rows: Rows, layout: str) -> int:
    return rows.token_ids.size if layout == "padded" else unique_tokens(rows, share=layout == "tree")


@pytest.mark.parametrize("cut", [partition, lambda ids, lengths, most: tree_micro_batches(groups_of([ids.tolist()]), most)])
def test_a_limit_below_one_token_is_refused(cut):
    with pytest.raises(ValueError, match="max_tokens must be at least 1, got 0"):
        cut(*padded([[1, 2]]), 0)


def test_ratios_of_batches_that_share_nothing_with_each_other():
    """Rows ``1 2 3``, ``1 2 4`` (6 tokens, 4 unique; 12 pairs, 9 unique) and ``5 6`` (2 and 2; 3 and 3); trained are the last tokens: 2 of 2, and 1 of 1."""
    first = sharing(np.array([[1, 2, 3], [1, 2, 4]]), np.array([3, 3]), np.array([[False, False, True]] * 2))
    second = sharing(np.array([[5, 6]]), np.array([2]), np.array([[False, True]]))
    both = in_all([first, second])
    assert (both.unique_tokens, both.unique_pairs, both.unique_targets) == (6, 12, 3)
    assert (both.tokens, both.pairs, both.targets) == pytest.approx((8 / 6, 15 / 12, 1.0))
    assert in_all([]).tokens == 1
