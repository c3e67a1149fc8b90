import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specgrad import memory
from specgrad.linalg import h_lambda, h_lambda_derivative
from specgrad.memory import softmax

TASK = memory.Task(num_items=403, dim=7, alpha=1.5, seed=3, kappa_u=0.5)


def autograd_loss(task, weight, q):
    logits = task.embeddings @ weight.T @ task.unembeddings.T
    return -(q * logits.log_softmax(1).diagonal()).sum()


def random_weight(task, scale, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(task.dim, task.dim, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("scale", [0.0, 0.3, 3.0, 300.0])
@pytest.mark.parametrize("batch_size", [None, 40])
def test_gradient_and_loss_equal_autograd(monkeypatch, scale, batch_size):
    monkeypatch.setattr(softmax, "_TILE_ROWS", 64)
    monkeypatch.setattr(softmax, "_TILE_COLUMNS", 50)
    weight = random_weight(TASK, scale).requires_grad_()
    q = TASK.frequencies if batch_size is None else TASK.sample(batch_size)
    loss = autograd_loss(TASK, weight, q)
    (expected,) = torch.autograd.grad(loss, weight)
    got, value = memory.gradient_and_loss(TASK, weight.detach(), q)
    torch.testing.assert_close(got, -expected, rtol=1e-12, atol=1e-13)
    assert value == pytest.approx(loss.item(), rel=1e-12)
    assert memory.loss(TASK, weight.detach(), q) == value


@pytest.mark.parametrize("scale", [0.0, 2.0])
def test_hessian_product_equals_autograd(scale):
    weight, along = random_weight(TASK, scale), random_weight(TASK, 1.0, seed=1)
    _, expected = torch.autograd.functional.hvp(lambda w: autograd_loss(TASK, w, TASK.frequencies), weight, along)
    torch.testing.assert_close(memory.hessian_product(TASK, along, weight), expected, rtol=1e-12, atol=1e-14)


def test_large_logits_do_not_overflow():
    task = memory.Task(300, 5, 1.5, dtype=torch.float32)
    got, value = memory.gradient_and_loss(task, 1e4 * torch.eye(5))
    assert got.isfinite().all()
    assert 0 <= value < float("inf")


def test_float32_tasks_lose_only_rounding():
    half = memory.Task(403, 7, 1.5, seed=3, kappa_u=0.5, dtype=torch.float32)
    weight = random_weight(TASK, 1.0)
    exact = memory.gradient(TASK, weight)
    assert (memory.gradient(half, weight) - exact).norm() < 1e-5 * exact.norm()


def test_zero_weight_is_the_start():
    assert torch.equal(memory.gradient(TASK, torch.zeros(7, 7)), memory.gradient(TASK))


def test_a_task_keeps_its_start_gradient_from_being_changed():
    start = memory.gradient(TASK)
    memory.gradient(TASK).zero_()
    assert torch.equal(memory.gradient(TASK), start)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.1, 5))
def test_gradient_is_linear_in_frequencies(seed, scale):
    weight = random_weight(TASK, scale, seed)
    parts = [TASK.sample(20, step) for step in (seed, seed + 1)]
    total = sum(memory.gradient(TASK, weight, q) for q in parts)
    torch.testing.assert_close(memory.gradient(TASK, weight, parts[0] + parts[1]), total, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("lam", [1e-2, 1e-3])
def test_the_slope_of_the_signal_equals_central_differences(lam):
    task = memory.Task(500, 24, 1.5, seed=7)
    q = task.frequencies.clone()
    q[5] = 0
    rest, u, v = memory.uncentred_gradient(task, q), task.unembeddings[5], task.embeddings[5]
    signal = lambda x: u @ h_lambda(rest + x * torch.outer(u, v), lam) @ v  # noqa: E731
    step = 1e-4 * lam
    slope = (signal(step) - signal(-step)) / (2 * step)
    torch.testing.assert_close(h_lambda_derivative(rest, u, v, lam), slope, rtol=1e-6, atol=0)
