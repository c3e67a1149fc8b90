"""What every optimizer must do; a new one joins OPTIMIZERS by being exported."""

import copy
import inspect
import io

import pytest
import torch
from torch import nn

import specgrad.optim
from specgrad.linalg import polar_factor
from specgrad.optim import SpectralOptimizer, param_groups

OPTIMIZERS = [
    value
    for value in vars(specgrad.optim).values()
    if inspect.isclass(value) and issubclass(value, SpectralOptimizer) and value is not SpectralOptimizer
]
each_optimizer = pytest.mark.parametrize("optimizer_class", OPTIMIZERS, ids=lambda c: c.__name__)


def small_model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6, bias=False), nn.Linear(6, 11))


def train(model, optimizer, steps, first=0):
    for step in range(first, first + steps):
        ids = torch.randint(11, (9,), generator=torch.Generator().manual_seed(step))
        nn.functional.cross_entropy(model(ids), ids.roll(1)).backward()
        optimizer.step()
        optimizer.zero_grad()


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def assert_equal(first, second):
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_there_is_at_least_one_optimizer():
    assert OPTIMIZERS


@each_optimizer
def test_a_run_is_bitwise_deterministic(optimizer_class):
    results = []
    for _ in range(2):
        model = small_model()
        train(model, optimizer_class(param_groups(model)), 5)
        results.append(weights(model))
    assert_equal(*results)


@each_optimizer
def test_resuming_from_a_saved_state_equals_the_uninterrupted_run(optimizer_class):
    model = small_model()
    optimizer = optimizer_class(param_groups(model))
    train(model, optimizer, 3)
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], file)
    train(model, optimizer, 3, first=3)
    file.seek(0)
    saved_model, saved_optimizer = torch.load(file, weights_only=True)
    resumed = small_model(seed=1)
    resumed_optimizer = optimizer_class(param_groups(resumed))
    resumed.load_state_dict(saved_model)
    resumed_optimizer.load_state_dict(saved_optimizer)
    train(resumed, resumed_optimizer, 3, first=3)
    assert_equal(weights(model), weights(resumed))


@each_optimizer
def test_the_state_has_all_its_keys_before_the_first_step(optimizer_class):
    model = small_model()
    optimizer = optimizer_class(param_groups(model))
    before = {k: sorted(v) for k, v in optimizer.state_dict()["state"].items()}
    train(model, optimizer, 1)
    assert before == {k: sorted(v) for k, v in optimizer.state_dict()["state"].items()}
    assert len(before) == len(list(model.parameters()))


@each_optimizer
def test_gradients_are_not_written(optimizer_class):
    for dtype in (torch.float32, torch.bfloat16):
        for nesterov in (True, False):
            weight = nn.Parameter(torch.randn(4, 6).to(dtype))
            weight.grad = torch.randn(4, 6).to(dtype)
            before = weight.grad.clone()
            optimizer = optimizer_class([weight], nesterov=nesterov)
            optimizer.step()
            momentum = optimizer.state[weight]["momentum"].clone()
            assert torch.equal(weight.grad, before)
            torch.testing.assert_close(momentum, before * (1 - 0.95), rtol=2e-2, atol=1e-3)


@each_optimizer
def test_a_parameter_without_gradient_keeps_its_value_and_its_state(optimizer_class):
    first, second = (nn.Parameter(torch.ones(3, 3)) for _ in range(2))
    optimizer = optimizer_class([first, second], weight_decay=0.5)
    first.grad = torch.eye(3)
    optimizer.step()
    assert torch.equal(second, torch.ones(3, 3))
    assert torch.equal(optimizer.state[second]["momentum"], torch.zeros(3, 3))
    assert second.grad is None


@each_optimizer
def test_learning_rate_zero_moves_nothing(optimizer_class):
    model = small_model()
    before = weights(model)
    train(model, optimizer_class(param_groups(model), lr=0.0, adamw_lr=0.0), 2)
    assert_equal(before, weights(model))


@each_optimizer
def test_parameters_of_equal_shape_in_one_batch_move_as_they_would_alone(optimizer_class):
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(5, 7, generator=generator) for _ in range(3)]
    grads = [torch.randn(5, 7, generator=generator) for _ in range(3)]
    together = [nn.Parameter(w.clone()) for w in start]
    alone = [nn.Parameter(w.clone()) for w in start]
    for weight, grad in zip(together + alone, grads + grads, strict=True):
        weight.grad = grad.clone()
    optimizer_class(together).step()
    for weight in alone:
        optimizer_class([weight]).step()
    for a, b in zip(together, alone, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)


@each_optimizer
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_non_finite_gradient_is_skipped_or_raised_without_touching_any_state(optimizer_class, bad):
    def fresh(nonfinite):
        healthy, sick = nn.Parameter(torch.eye(3)), nn.Parameter(torch.eye(3))
        healthy.grad, sick.grad = torch.eye(3), torch.full((3, 3), bad)
        return healthy, sick, optimizer_class([healthy, sick], nonfinite=nonfinite)

    healthy, sick, optimizer = fresh("skip")
    optimizer.step()
    assert torch.equal(sick, torch.eye(3))
    assert torch.equal(optimizer.state[sick]["momentum"], torch.zeros(3, 3))
    assert not torch.equal(healthy, torch.eye(3))
    healthy, sick, optimizer = fresh("raise")
    with pytest.raises(FloatingPointError, match="1 of 2 gradients"):
        optimizer.step()
    assert torch.equal(healthy, torch.eye(3))
    healthy, sick, optimizer = fresh("propagate")
    optimizer.step()
    assert sick.isnan().all()
    assert healthy.isfinite().all()


@each_optimizer
def test_a_closure_is_called_with_gradients_enabled_and_its_loss_returned(optimizer_class):
    model = small_model()
    optimizer = optimizer_class(param_groups(model))

    def closure():
        value = model(torch.arange(11)).square().mean()
        value.backward()
        return value

    assert optimizer.step(closure).requires_grad


@each_optimizer
def test_learning_rate_schedulers_and_tensor_learning_rates_work(optimizer_class):
    model = small_model()
    optimizer = optimizer_class(param_groups(model), lr=torch.tensor(0.02))
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=4)
    train(model, optimizer, 2)
    scheduler.step()
    train(model, optimizer, 2)
    assert all(w.isfinite().all() for w in weights(model))


@each_optimizer
def test_a_deep_copy_trains_on_its_own(optimizer_class):
    model = small_model()
    optimizer = optimizer_class(param_groups(model))
    train(model, optimizer, 1)
    before = weights(model)
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    train(twin, twin_optimizer, 1, first=1)
    assert_equal(before, weights(model))
    assert not torch.equal(next(twin.parameters()), before[0])


@each_optimizer
def test_non_contiguous_parameters_are_updated_in_place(optimizer_class):
    weight = nn.Parameter(torch.randn(6, 4).T)
    weight.grad = torch.randn(4, 6)
    twin = nn.Parameter(weight.detach().clone(memory_format=torch.contiguous_format))
    twin.grad = weight.grad.clone()
    optimizer_class([weight]).step()
    optimizer_class([twin]).step()
    torch.testing.assert_close(weight, twin, atol=1e-6, rtol=0)


@each_optimizer
@pytest.mark.parametrize(
    "settings, message",
    [
        ({"lr": -1.0}, "`lr`.*>= 0; got -1.0"),
        ({"lr": float("nan")}, "`lr`"),
        ({"momentum": 1.0}, r"`momentum`.*\[0, 1\); got 1.0"),
        ({"weight_decay": -0.1}, "`weight_decay`"),
        ({"scale": "big"}, "`scale`.*original.*'big'"),
        ({"nonfinite": "ignore"}, "`nonfinite`.*propagate.*'ignore'"),
    ],
)
def test_settings_out_of_range_are_refused_by_name_and_value(unchecked_types, optimizer_class, settings, message):
    with pytest.raises(ValueError, match=message):
        optimizer_class([nn.Parameter(torch.eye(2))], **settings)


@each_optimizer
@pytest.mark.parametrize(
    "value, error, message",
    [
        (torch.ones(3), ValueError, "bias.*must be a matrix.*param_groups"),
        (torch.ones(2, 2, 3, 3), ValueError, "bias.*must be a matrix"),
        (torch.ones(2, 2, dtype=torch.complex64), TypeError, "bias.*real floating"),
    ],
)
def test_a_parameter_that_is_no_real_matrix_is_refused_by_name_with_the_way_out(
    unchecked_types, optimizer_class, value, error, message
):
    with pytest.raises(error, match=message):
        optimizer_class([("bias", nn.Parameter(value))])


def test_muon_steps_by_the_scaled_polar_factor_of_nesterov_momentum_with_decoupled_decay():
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randn(12, 5, generator=generator))
    start, average = weight.detach().clone(), torch.zeros(12, 5)
    optimizer = specgrad.optim.Muon([weight], lr=0.1, momentum=0.9, weight_decay=0.2)
    for _ in range(3):
        weight.grad = torch.randn(12, 5, generator=generator)
        average = 0.9 * average + 0.1 * weight.grad
        direction = polar_factor(0.9 * average + 0.1 * weight.grad)
        start = start * (1 - 0.1 * 0.2) - 0.1 * (12 / 5) ** 0.5 * direction
        optimizer.step()
    torch.testing.assert_close(weight.detach(), start, atol=2e-5, rtol=0)


def test_adamw_groups_follow_the_trajectory_of_pytorchs_adamw_bit_for_bit():
    ours, theirs = small_model(), small_model()
    groups = [{"params": list(ours.parameters()), "update": "adamw", "weight_decay": 0.1}]
    train(ours, specgrad.optim.Muon(groups, adamw_lr=0.01), 5)
    train(theirs, torch.optim.AdamW(theirs.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.1), 5)
    assert_equal(weights(ours), weights(theirs))


def test_muon_converges_to_the_minimum_of_a_quadratic():
    generator = torch.Generator().manual_seed(1)
    target = torch.randn(8, 8, generator=generator)
    weight = nn.Parameter(torch.zeros(8, 8))
    optimizer = specgrad.optim.Muon([weight], lr=0.2, weight_decay=0.0)
    for step in range(300):
        optimizer.param_groups[0]["lr"] = 0.2 * (1 - step / 300)
        weight.grad = (weight - target).detach()
        optimizer.step()
    assert torch.linalg.norm(weight - target) < 0.05 * torch.linalg.norm(target)
