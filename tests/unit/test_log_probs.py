"""Chunked log-probs equal log_softmax over full logits, in values and in every gradient."""

from types import SimpleNamespace

import pytest
import torch

from rlox_grpo.model.log_probs import tile_shape, token_log_probs
from rlox_grpo.types import OutputHead

M, H, V = 23, 8, 37
FEW = (11, 4, 13)
"""M, H and V for gradcheck, which calls the function twice for each number that it varies."""


def full(hidden, token_ids, head, temperature):
    logits = torch.nn.functional.linear(hidden, head.weight, head.bias) * head.scale
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    log_softmax = torch.log_softmax(logits / temperature, dim=-1)
    entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    return log_softmax.gather(-1, token_ids[:, None]).squeeze(-1), entropy


def inputs(dtype=torch.float64, bias=True, sizes=(M, H, V)):
    m, h, v = sizes
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(m, h, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(v, h, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    offset = torch.randn(v, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() if bias else None
    token_ids = torch.randint(v, (m,), generator=generator)
    return hidden, weight, offset, token_ids


@pytest.mark.parametrize("tile", [(1, 1000), (5, 3), (M, V), (1000, 1), None])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kept_bytes", [0, 11 * V * 8, None])
def test_values_and_gradients_equal_full_logits(tile, softcap, scale, bias, kept_bytes):
    hidden, weight, offset, token_ids = inputs(bias=bias)
    head = OutputHead(weight, offset, scale, softcap)
    weights = torch.linspace(-1, 1, M, dtype=torch.float64)
    expected, expected_entropy = full(hidden, token_ids, head, 0.7)
    leaves = [hidden, weight] + ([offset] if bias else [])
    expected_gradients = torch.autograd.grad((expected * weights).sum(), leaves)
    found, entropy = token_log_probs(hidden, token_ids, head, temperature=0.7, tile=tile, stored_bytes=kept_bytes)
    gradients = torch.autograd.grad((found * weights).sum(), leaves)
    # float64: only the order of sums differs
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(entropy, expected_entropy, rtol=1e-12, atol=1e-12)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-10, atol=1e-12)


def test_gradcheck():
    hidden, weight, offset, token_ids = inputs(sizes=FEW)

    def of(hidden, weight, offset):
        return token_log_probs(hidden, token_ids, OutputHead(weight, offset, 0.5, 2.0), tile=(4, 3))[0]

    assert torch.autograd.gradcheck(of, (hidden, weight, offset))


def test_tied_weights_collect_both_gradients():
    _, weight, _, token_ids = inputs(bias=False)

    def gradient(log_probs_of):
        embedded = torch.nn.functional.embedding(token_ids, weight)
        return torch.autograd.grad(log_probs_of(embedded).sum(), weight)[0]

    expected = gradient(lambda embedded: full(embedded, token_ids, OutputHead(weight), 1.0)[0])
    found = gradient(lambda embedded: token_log_probs(embedded, token_ids, OutputHead(weight))[0])
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_a_frozen_head_gets_no_gradient():
    hidden, weight, offset, token_ids = inputs()
    head = OutputHead(weight.detach(), offset.detach())
    log_probs, _ = token_log_probs(hidden, token_ids, head)
    log_probs.sum().backward()
    assert hidden.grad is not None


def test_bfloat16_is_normalised_in_float32():
    hidden, weight, _, token_ids = inputs(torch.bfloat16, bias=False)
    found, _ = token_log_probs(hidden, token_ids, OutputHead(weight))
    expected, _ = full(hidden.float(), token_ids, OutputHead(weight.float()), 1.0)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=0, atol=0.05)  # one bfloat16 rounding of logits near 8
    found.sum().backward()
    assert weight.grad.dtype == torch.bfloat16


class LargestTensor(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes the most elements that any operation gave, of those it was not given."""

    def __init__(self):
        super().__init__()
        self.size = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        found = out if isinstance(out, (tuple, list)) else [out]
        self.size = max([self.size, *(tensor.numel() for tensor in found if torch.is_tensor(tensor))])
        return out


@pytest.mark.parametrize("kept_tiles", [0, 3])
def test_full_logits_never_exist(kept_tiles):
    """Peak allocation is the tile's or the budget's, whatever tokens × vocabulary is."""
    tokens, vocabulary = 4096, 16384
    hidden = torch.randn(tokens, 4, requires_grad=True)
    weight = torch.randn(vocabulary, 4, requires_grad=True)
    with LargestTensor() as largest:
        log_probs, _ = token_log_probs(
            hidden,
            torch.zeros(tokens, dtype=torch.int64),
            OutputHead(weight),
            tile=(64, 1024),
            stored_bytes=(kept_tiles * 64 + 63) * vocabulary * 4,
        )
        log_probs.sum().backward()
    assert largest.size == max(64 * 1024, kept_tiles * 64 * vocabulary)


@pytest.mark.parametrize("needed", [True, False])
def test_logits_are_kept_for_a_backward_pass_alone(needed):
    hidden, weight, _, token_ids = inputs(bias=False)
    with LargestTensor() as largest, torch.set_grad_enabled(needed):
        token_log_probs(hidden, token_ids, OutputHead(weight), tile=(2, 3))
    assert largest.size == M * V if needed else largest.size < 2 * M


def test_a_second_backward_pass_finds_the_kept_logits_as_they_were():
    hidden, weight, _, token_ids = inputs(bias=False)
    log_probs, _ = token_log_probs(hidden, token_ids, OutputHead(weight), tile=(2, 3))
    first = torch.autograd.grad(log_probs.sum(), weight, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(log_probs.sum(), weight)[0], first)


def test_entropies_are_left_out_when_nobody_reads_them():
    hidden, weight, _, token_ids = inputs(bias=False)
    found, entropy = token_log_probs(hidden, token_ids, OutputHead(weight), with_entropy=False, tile=(3, 2))
    expected, _ = full(hidden, token_ids, OutputHead(weight), 1.0)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert not entropy.any()


def test_a_gpu_tile_holds_whole_rows(monkeypatch):
    def device_of(gibibytes: float) -> None:
        properties = SimpleNamespace(total_memory=int(gibibytes * 2**30))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)

    cuda = torch.device("cuda")
    device_of(16)
    assert tile_shape(2**15, cuda) == (16 * 2**30 // 64 // (4 * 2**15), 2**15)
    device_of(0.5)
    assert tile_shape(2**15, cuda) == (512, 2**15)  # never less than 64 MiB
    device_of(140)
    assert tile_shape(2**15, cuda) == (8192, 2**15)  # never more than 1 GiB
    assert tile_shape(2**30, cuda) == (1, 2**30)


def test_extreme_logits_stay_finite():
    hidden = torch.full((2, 1), 1e4, requires_grad=True)
    log_probs, entropy = token_log_probs(hidden, torch.tensor([0, 1]), OutputHead(torch.tensor([[1.0], [-1.0]])))
    log_probs.sum().backward()
    assert torch.equal(log_probs.detach(), torch.tensor([0.0, -2e4]))
    assert torch.isfinite(hidden.grad).all()
    assert torch.equal(entropy, torch.zeros(2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": torch.tensor([0, V])}, f"token_ids hold {V}"),
        ({"token_ids": torch.tensor([-1, 0])}, "token_ids hold -1"),
        ({"token_ids": torch.tensor([0])}, r"expected \[M, H\]"),
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"hidden": torch.zeros(2, H + 1)}, r"expected \[M, H\]"),
    ],
)
def test_refusals(change, message):
    arguments = {"hidden": torch.zeros(2, H), "token_ids": torch.tensor([0, 1]), **change}
    with pytest.raises(ValueError, match=message):
        token_log_probs(head=OutputHead(torch.zeros(V, H)), **arguments)


def test_no_tokens_at_all():
    log_probs, entropy = token_log_probs(
        torch.zeros(0, H), torch.zeros(0, dtype=torch.int64), OutputHead(torch.zeros(V, H))
    )
    assert log_probs.shape == entropy.shape == (0,)


# --- gradients through the entropies ---


@pytest.mark.parametrize("tile", [(1, 1000), (5, 3), (M, V), None])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("bias", [True, False])
def test_entropy_gradients_equal_full_logits(tile, softcap, bias):
    hidden, weight, offset, token_ids = inputs(bias=bias)
    head = OutputHead(weight, offset, 0.3, softcap)
    ups, downs = torch.linspace(-1, 1, M, dtype=torch.float64), torch.linspace(2, -1, M, dtype=torch.float64)
    leaves = [hidden, weight] + ([offset] if bias else [])
    log_probs, entropy = full(hidden, token_ids, head, 0.7)
    expected = torch.autograd.grad((log_probs * ups + entropy * downs).sum(), leaves)
    log_probs, entropy = token_log_probs(hidden, token_ids, head, temperature=0.7, entropy_gradient=True, tile=tile)
    found = torch.autograd.grad((log_probs * ups + entropy * downs).sum(), leaves)
    for gradient, expected_gradient in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-10, atol=1e-12)


def test_entropy_alone_has_a_gradient():
    hidden, weight, offset, token_ids = inputs(sizes=FEW)

    def of(hidden, weight, offset):
        head = OutputHead(weight, offset, 0.5, 2.0)
        return token_log_probs(hidden, token_ids, head, entropy_gradient=True, tile=(4, 3))[1]

    assert torch.autograd.gradcheck(of, (hidden, weight, offset))


def test_extreme_logits_keep_entropy_gradients_finite():
    hidden = torch.full((2, 1), 1e4, requires_grad=True)
    head = OutputHead(torch.tensor([[1.0], [-1.0]]))
    _, entropy = token_log_probs(hidden, torch.tensor([0, 1]), head, entropy_gradient=True)
    entropy.sum().backward()
    assert torch.equal(hidden.grad, torch.zeros(2, 1))


def test_a_gradient_of_entropies_that_are_left_out_is_refused():
    with pytest.raises(ValueError, match="entropy_gradient is True and with_entropy is False"):
        token_log_probs(
            torch.zeros(1, H),
            torch.tensor([0]),
            OutputHead(torch.zeros(V, H)),
            with_entropy=False,
            entropy_gradient=True,
        )
