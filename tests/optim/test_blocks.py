import pytest
import torch
from torch import nn

from specgrad.linalg import polar_factor
from specgrad.optim import Blocks, Muon, param_groups, shape_factor


def stepped(value, grad, **group):
    weight = nn.Parameter(value.clone(memory_format=torch.preserve_format))
    weight.grad = grad.clone()
    Muon([{"params": [weight], **group}], lr=1.0, momentum=0.0, weight_decay=0.0).step()
    return value - weight.detach()


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_a_fused_projection_gets_one_polar_factor_per_part():
    grad = randn(12 + 4 + 4, 8)
    got = stepped(torch.zeros(20, 8), grad, blocks=Blocks(rows=(12, 4, 4)))
    for part, part_grad in zip(got.split((12, 4, 4)), grad.split((12, 4, 4)), strict=True):
        expected = shape_factor("original", *part.shape) * polar_factor(part_grad)
        torch.testing.assert_close(part, expected, atol=1e-5, rtol=0)


def test_heads_are_equal_parts_of_the_outputs():
    grad = randn(12, 8)
    got = stepped(torch.zeros(12, 8), grad, blocks=Blocks(rows=3))
    for head, head_grad in zip(got.chunk(3), grad.chunk(3), strict=True):
        torch.testing.assert_close(head, polar_factor(head_grad), atol=1e-5, rtol=0)


def test_stacked_experts_are_a_batch_of_matrices():
    grad = randn(5, 6, 8)
    got = stepped(torch.zeros(5, 6, 8), grad, blocks=Blocks("batch"))
    torch.testing.assert_close(got, torch.stack([polar_factor(g) for g in grad]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_convolution_is_its_flattened_matrix_in_direction_and_shape_factor(layout):
    grad = randn(32, 3, 2, 2)
    value = torch.zeros(32, 3, 2, 2).to(memory_format=layout)
    got = stepped(value, grad.to(memory_format=layout), blocks=Blocks("flatten"))
    expected = (32 / 12) ** 0.5 * polar_factor(grad.reshape(32, 12)).reshape(32, 3, 2, 2)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)


def test_a_grouped_convolution_has_one_block_per_group():
    grad = randn(8, 3, 3, 3)
    got = stepped(torch.zeros(8, 3, 3, 3), grad, blocks=Blocks("flatten", rows=2))
    for half, half_grad in zip(got.chunk(2), grad.chunk(2), strict=True):
        torch.testing.assert_close(half.reshape(4, 27), polar_factor(half_grad.reshape(4, 27)), atol=1e-5, rtol=0)


def test_a_transposed_matrix_takes_the_shape_factor_of_its_outputs():
    grad = randn(4, 16)
    got = stepped(torch.zeros(4, 16), grad, blocks=Blocks(transposed=True))
    torch.testing.assert_close(got, 2 * polar_factor(grad), atol=1e-5, rtol=0)


def test_splitting_both_axes_tiles_the_matrix():
    parts = Blocks(rows=2, cols=(1, 5)).views(torch.arange(24.0).reshape(4, 6))
    assert [tuple(p.shape) for p in parts] == [(1, 2, 1), (1, 2, 5)] * 2


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"layout": "stack"}, "`layout`.*matrix, flatten or batch; got 'stack'"),
        ({"rows": 0}, "`rows`.*got 0"),
        ({"cols": (3, -1)}, "`cols`"),
        ({"rows": ()}, "`rows`"),
    ],
)
def test_declarations_that_make_no_sense_are_refused(arguments, message, unchecked_types):
    with pytest.raises(ValueError, match=message):
        Blocks(**arguments)


@pytest.mark.parametrize(
    "shape, blocks, message",
    [
        ((4, 6), Blocks(rows=3), "qkv.*divisible into 3 `rows`; got length 4"),
        ((4, 6), Blocks(rows=(1, 2)), "qkv.*add up to 3; got length 4"),
        ((4, 6), Blocks("batch"), "qkv.*at least three axes"),
        ((4, 6, 2), Blocks(), "qkv.*must be a matrix.*got shape"),
    ],
)
def test_a_parameter_that_does_not_fit_its_declaration_is_refused_by_name_at_construction(shape, blocks, message):
    weight = nn.Parameter(torch.zeros(shape))
    with pytest.raises(ValueError, match=message):
        Muon([{"params": [("qkv", weight)], "blocks": blocks}])
    model = nn.Module()
    model.qkv = weight
    with pytest.raises(ValueError, match=message):
        param_groups(model, blocks={"qkv": blocks})


def test_declarations_survive_a_checkpoint_that_is_loaded_with_weights_only(tmp_path):
    def fresh():
        weight = nn.Parameter(torch.zeros(6, 4))
        return weight, Muon([{"params": [weight], "blocks": Blocks(rows=(2, 4))}])

    weight, optimizer = fresh()
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    other, loaded = fresh()
    loaded.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for p, o in ((weight, optimizer), (other, loaded)):
        p.grad = randn(6, 4)
        o.step()
    assert torch.equal(weight, other)
