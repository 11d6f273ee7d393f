"""The head in tiles against the whole logits: values, gradients, types, and how much of the logits exists at once."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from arpo_algo import head as head_module
from arpo_algo.head import head_logprobs

TOKENS, WIDTH, VOCABULARY = 6, 5, 11
WHOLE = TOKENS * VOCABULARY


def case(
    tokens: int = TOKENS, *, vocabulary: int = VOCABULARY, width: int = WIDTH, bias: bool = True, dtype: torch.dtype = torch.float64
) -> tuple[nn.Linear, Tensor, Tensor]:
    """A head, hidden states and targets; logits of a few units apart."""
    torch.manual_seed(0)
    head = nn.Linear(width, vocabulary, bias=bias, dtype=dtype)
    nn.init.normal_(head.weight, std=1.0)
    return head, torch.randn(tokens, width, dtype=dtype, requires_grad=True), torch.randint(0, vocabulary, (tokens,))


def naive(head: nn.Module, hidden: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logits = head(hidden)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    logprobs = (logits / temperature).log_softmax(-1)[torch.arange(len(targets)), targets]
    log_p = logits.log_softmax(-1)
    return logprobs, -(log_p.exp() * log_p).sum(-1)


def gradients(head: nn.Module, hidden: Tensor, values: tuple[Tensor, Tensor], entropy_grad: bool = True) -> list[Tensor]:
    """Of a sum in which every token has weights of its own."""
    a, b = (torch.linspace(low, 2, len(hidden), dtype=values[0].dtype) for low in (-1, 1))
    loss = (a * values[0]).sum() + ((b * values[1]).sum() if entropy_grad else 0)
    return list(torch.autograd.grad(loss, [hidden, *(p for p in head.parameters() if p.requires_grad)]))


def distance(expected: list[Tensor], got: list[Tensor]) -> float:
    return max(float((e.detach().double() - g.detach().double()).norm() / e.detach().double().norm()) for e, g in zip(expected, got, strict=True))


def test_two_logits_by_hand():
    """Logits 0 and ln 3: probabilities 1/4 and 3/4, entropy ln 4 - 3/4 ln 3. At temperature 1/2 logits 0 and ln 9: 1/10 and 9/10."""
    head = nn.Linear(1, 2, bias=False, dtype=torch.float64)
    head.weight.data = torch.tensor([[0.0], [math.log(3)]], dtype=torch.float64)
    hidden, targets = torch.ones(2, 1, dtype=torch.float64, requires_grad=True), torch.tensor([0, 1])
    for bound in (1, 100):
        logprobs, entropies = head_logprobs(head, hidden, targets, temperature=0.5, chunk_elements=bound, entropy_grad=False)
        assert logprobs.exp().tolist() == pytest.approx([0.1, 0.9])
        assert entropies.tolist() == pytest.approx([math.log(4) - 0.75 * math.log(3)] * 2)
        # d log P(0) / d logits = (1 - 0.1, -0.9) / 0.5, times the hidden state 1; token 1 has weight 0
        (gradient,) = torch.autograd.grad(logprobs[0], head.weight)
        assert gradient.flatten().tolist() == pytest.approx([1.8, -1.8])


@pytest.mark.parametrize(("temperature", "entropy_grad", "bound", "bias"), [*product((1.0, 0.6), (False, True), (1, 7, 35, WHOLE - 1, WHOLE), (False, True))])
def test_values_and_gradients_equal_those_of_whole_logits(temperature, entropy_grad, bound, bias):
    head, hidden, targets = case(bias=bias)
    values = head_logprobs(head, hidden, targets, temperature=temperature, chunk_elements=bound, entropy_grad=entropy_grad)
    expected = naive(head, hidden, targets, temperature)
    assert [value.requires_grad for value in values] == [True, entropy_grad]
    assert distance(list(expected), list(values)) < 1e-14
    assert distance(gradients(head, hidden, expected, entropy_grad), gradients(head, hidden, values, entropy_grad)) < 1e-13


@pytest.mark.parametrize("bound", [20, WHOLE])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_gradients_equal_finite_differences(temperature, bound):
    head, hidden, targets = case()

    def values(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        head.weight, head.bias = (nn.Parameter(tensor, requires_grad=False) for tensor in tensors[1:])
        found: tuple[Tensor, Tensor] = head_module._LinearHead.apply(*tensors, targets, temperature, bound, bound == WHOLE, True)
        return found

    assert torch.autograd.gradcheck(values, (hidden, head.weight, head.bias))


def test_logits_far_apart_stay_finite_and_exact():
    """The maximum comes last or first: 3,000 nats above the rest."""
    head, hidden, _ = case(bias=False)
    for peak in (0, VOCABULARY - 1):
        head.weight.data.zero_()
        head.weight.data[peak] = 1000.0
        hidden.data.fill_(0.6)
        targets = torch.tensor([peak, 3, peak, 4, peak, 5])
        values = head_logprobs(head, hidden, targets, temperature=1.0, chunk_elements=4, entropy_grad=True)
        assert values[0].tolist() == pytest.approx([0.0, -3000.0] * 3)
        assert values[1].tolist() == [0.0] * 6
        assert distance(gradients(head, hidden, naive(head, hidden, targets, 1.0)), gradients(head, hidden, values)) < 1e-12


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("bound", [1, 7, WHOLE])
@pytest.mark.parametrize("plain", [True, False])
def test_tokens_ruled_out_by_a_bias_of_minus_infinity_are_as_if_they_were_not_there(plain, bound, dtype, temperature):
    head, hidden, targets = case(dtype=dtype)
    kept = nn.Linear(WIDTH, VOCABULARY - 4, dtype=dtype)  # the last four are out, in tiles of one all there is in a tile
    kept.load_state_dict({name: weight[:-4] for name, weight in head.state_dict().items()})
    head.bias.data[-4:] = -math.inf
    targets = targets % (VOCABULARY - 4)
    chosen = head if plain else subclass(head)
    got = head_logprobs(chosen, hidden, targets, temperature=temperature, chunk_elements=bound * (1 if plain else VOCABULARY), entropy_grad=True)
    kept = kept if plain else subclass(kept)
    expected = naive(kept, hidden, targets, temperature)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    assert all(torch.allclose(a, b.to(a.dtype), atol=tolerance, rtol=0) for a, b in zip(got, expected, strict=True))
    of_hidden, of_weight, of_bias = gradients(chosen, hidden, got)
    wanted = gradients(kept, hidden, expected)
    assert distance(wanted, [of_hidden, of_weight[:-4], of_bias[:-4]]) < tolerance
    assert not of_weight[-4:].any() and not of_bias[-4:].any()


@pytest.mark.parametrize("bound", [300, 10**6])
def test_float32_stays_close_to_float64(bound):
    head, hidden, targets = case(40, vocabulary=300, width=32, dtype=torch.float32)
    values = head_logprobs(head, hidden, targets, temperature=0.8, chunk_elements=bound, entropy_grad=True)
    found = gradients(head, hidden, values)
    exact, exact_hidden = nn.Linear(32, 300, dtype=torch.float64), hidden.detach().double().requires_grad_()
    exact.load_state_dict(head.state_dict())
    expected = naive(exact, exact_hidden, targets, 0.8)
    assert values[0].dtype == values[1].dtype == torch.float32
    assert distance(list(expected), list(values)) < 1e-6
    assert distance(gradients(exact, exact_hidden, expected), found) < 1e-6


@pytest.mark.parametrize("kept_in_16_bits", [False, True], ids=["autocast", "16-bit weights"])
@pytest.mark.parametrize("bound", [300, 10**6])
def test_bfloat16_is_no_further_from_float64_than_whole_logits(bound, kept_in_16_bits):
    head, hidden, targets = case(40, vocabulary=300, width=32, dtype=torch.bfloat16 if kept_in_16_bits else torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not kept_in_16_bits):
        values = head_logprobs(head, hidden, targets, temperature=0.8, chunk_elements=bound, entropy_grad=True)
        whole = naive(head, hidden, targets, 0.8)
    exact, exact_hidden = nn.Linear(32, 300, dtype=torch.float64), hidden.detach().double().requires_grad_()
    exact.load_state_dict(head.state_dict())
    expected = naive(exact, exact_hidden, targets, 0.8)
    truth, found, other = gradients(exact, exact_hidden, expected), gradients(head, hidden, values), gradients(head, hidden, whole)
    assert values[0].dtype == values[1].dtype == torch.float32
    assert [g.dtype for g in found] == [g.dtype for g in other]
    assert distance(list(expected), list(values)) <= 1.2 * distance(list(expected), list(whole))
    assert distance(truth, found) <= 1.2 * distance(truth, other)


@pytest.mark.parametrize("frozen", ["head", "hidden"])
def test_frozen_inputs_get_no_gradient(frozen):
    head, hidden, targets = case()
    head.requires_grad_(frozen != "head")
    hidden.requires_grad_(frozen != "hidden")
    logprobs, _ = head_logprobs(head, hidden, targets, temperature=1.0, chunk_elements=10, entropy_grad=False)
    logprobs.sum().backward()
    assert (head.weight.grad is None, head.bias.grad is None, hidden.grad is None) == ((True, True, False) if frozen == "head" else (False, False, True))


def test_a_tied_weight_gets_the_sum_of_both_its_uses():
    head, _, targets = case(bias=False)
    ids = torch.arange(TOKENS)
    for bound in (10, WHOLE):
        tiled, _ = head_logprobs(head, F.embedding(ids, head.weight), targets, temperature=1.0, chunk_elements=bound, entropy_grad=False)
        whole, _ = naive(head, F.embedding(ids, head.weight), targets, 1.0)
        assert distance(*([torch.autograd.grad(values.sum(), head.weight)[0]] for values in (whole, tiled))) < 1e-13


def test_no_tokens_give_a_gradient_of_zero():
    """A rank without rows takes part in the sum of gradients."""
    head, hidden, targets = case(0)
    logprobs, entropies = head_logprobs(head, hidden, targets, temperature=1.0, chunk_elements=10, entropy_grad=False)
    assert logprobs.shape == entropies.shape == (0,)
    logprobs.sum().backward()
    assert head.weight.grad is not None and not head.weight.grad.any()


def test_a_target_outside_the_vocabulary_is_not_a_number():
    head, hidden, targets = case()
    targets[2] = VOCABULARY
    logprobs, _ = head_logprobs(head, hidden, targets, temperature=1.0, chunk_elements=10, entropy_grad=False)
    assert logprobs.isnan().tolist() == [False, False, True, False, False, False]


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def subclass(head: nn.Linear) -> nn.Module:
    doubled = Doubled(WIDTH, VOCABULARY, dtype=head.weight.dtype)
    doubled.weight, doubled.bias = head.weight, head.bias
    return doubled


def hooked(head: nn.Linear) -> nn.Module:
    head.register_forward_hook(lambda module, args, output: 2 * output)
    return head


def replaced(head: nn.Linear) -> nn.Module:
    head.forward = lambda hidden: 2 * F.linear(hidden, head.weight, head.bias)  # type: ignore[method-assign]
    return head


@pytest.mark.parametrize("change", [subclass, hooked, replaced])
@pytest.mark.parametrize("bound", [3 * VOCABULARY, WHOLE])
def test_a_head_that_is_more_than_a_matrix_product_is_called(change, bound):
    head, hidden, targets = case()
    head = change(head)
    values = head_logprobs(head, hidden, targets, temperature=0.6, chunk_elements=bound, entropy_grad=True)
    expected = naive(head, hidden, targets, 0.6)
    assert distance(list(expected), list(values)) < 1e-14
    assert distance(gradients(head, hidden, expected), gradients(head, hidden, values)) < 1e-13
    with torch.no_grad():
        assert float((2 * F.linear(hidden, head.weight, head.bias) - head(hidden)).abs().max()) == 0  # the change is there


def test_logits_without_a_head():
    logits, targets = torch.randn(TOKENS, VOCABULARY, dtype=torch.float64), torch.arange(TOKENS)
    values = head_logprobs(None, logits, targets, temperature=0.6, chunk_elements=2 * VOCABULARY, entropy_grad=False)
    assert distance(list(naive(nn.Identity(), logits, targets, 0.6)), list(values)) < 1e-14


# -- memory --------------------------------------------------------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """Records the most elements of a tensor that any operation gave."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            results = result if isinstance(result, list | tuple) else [result]
            self.elements = max([self.elements, *(tensor.numel() for tensor in results if isinstance(tensor, Tensor))])
        return result


def largest(tokens: int, *, vocabulary: int, bound: int, width: int = 4) -> int:
    """In the forward and the backward."""
    head, hidden, targets = case(tokens, vocabulary=vocabulary, width=width)
    with Largest() as seen:
        values = head_logprobs(head, hidden, targets, temperature=0.7, chunk_elements=bound, entropy_grad=True)
        sum(value.sum() for value in values).backward()
    return seen.elements


@pytest.mark.parametrize("tokens", [32, 64, 128])
def test_no_tensor_is_larger_than_the_bound_whatever_the_number_of_tokens(tokens):
    assert largest(tokens, vocabulary=600, bound=32 * 32, width=1) == 32 * 32
    assert largest(tokens, vocabulary=600, bound=32 * 32, width=4) == 4 * 600  # the weight's gradient


def test_logits_that_fit_the_bound_are_kept_and_not_computed_twice(monkeypatch):
    calls = []
    logits = head_module._logits
    monkeypatch.setattr(head_module, "_logits", lambda *args: calls.append(args[3]) or logits(*args))
    head, hidden, targets = case()
    for bound, expected in ((WHOLE, 1), (WHOLE - 1, 4)):  # 6 x 11 logits in one tile, or tiles of 7 x 9 and of 7 x 2, each twice
        calls.clear()
        values = head_logprobs(head, hidden, targets, temperature=1.0, chunk_elements=bound, entropy_grad=False)
        values[0].sum().backward()
        assert len(calls) == expected
    with torch.no_grad():
        head_logprobs(head, hidden, targets, temperature=1.0, chunk_elements=WHOLE, entropy_grad=False)


@pytest.mark.parametrize(("tokens", "vocabulary", "elements"), [(1, 1, 1), (7, 13, 1), (7, 13, 20), (100, 3, 50), (3, 100, 50), (5, 5, 25), (0, 4, 9)])
def test_tiles_cover_every_logit_once_and_keep_the_bound(tokens, vocabulary, elements):
    counts = torch.zeros(tokens, vocabulary)
    for rows, columns in head_module._tiles(tokens, vocabulary, elements):
        counts[rows, columns] += 1
        assert counts[rows, columns].numel() <= elements
    assert bool((counts == 1).all())
