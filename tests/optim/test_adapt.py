import copy

import pytest
import torch
from torch import nn

from specgrad import Probe
from specgrad.optim import Muon, param_groups
from specgrad.probe import Evidence


class Says:
    """An adviser with a table of advantages by parameter."""

    def __init__(self):
        self.table = {}

    def evidence(self, parameter):
        value = self.table.get(id(parameter))
        return None if value is None else Evidence(value, ("holds",))


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 8, bias=False), nn.Linear(8, 4, bias=False))


def update_of(optimizer, parameter):
    return next(g["update"] for g in optimizer.param_groups if any(p is parameter for p in g["params"]))


def train(model, optimizer, steps, start=0):
    for step in range(start, start + steps):
        x = torch.randn(12, 6, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_parameters_move_to_adamw_and_back_with_hysteresis():
    model, says = network(), Says()
    optimizer = Muon(param_groups(model), lr=0.02, adapt=says, adapt_every=1, threshold=1.0, hysteresis=1.2)
    weight = model[0].weight
    seen = []
    for advantage in (2.0, 0.9, 0.8, 1.1, 1.3):
        says.table[id(weight)] = advantage
        train(model, optimizer, 2)
        seen.append(update_of(optimizer, weight))
    assert seen == ["spectral", "spectral", "adamw", "adamw", "spectral"]
    assert update_of(optimizer, model[2].weight) == "spectral"


def test_decisions_fall_only_at_the_given_steps():
    model, says = network(), Says()
    optimizer = Muon(param_groups(model), adapt=says, adapt_every=3)
    says.table[id(model[0].weight)] = 0.1
    updates = []
    for step in range(5):
        train(model, optimizer, 1, step)
        updates.append(update_of(optimizer, model[0].weight))
    assert updates == ["spectral", "spectral", "spectral", "adamw", "adamw"]


def test_without_moves_the_optimizer_is_bitwise_plain_muon():
    weights = []
    for adapt in (Says(), None):
        model = network()
        train(model, Muon(param_groups(model), adapt=adapt, adapt_every=2), 6)
        weights.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_a_parameter_that_left_is_updated_as_by_adamw_from_its_start():
    model, says = network(), Says()
    says.table = {id(p): 0.1 for p in model.parameters()}
    optimizer = Muon(param_groups(model), adapt=says, adapt_every=1, adamw_lr=0.01)
    train(model, optimizer, 1)
    twin = copy.deepcopy(model)
    reference = torch.optim.AdamW(twin.parameters(), lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    train(model, optimizer, 4, 1)
    train(twin, reference, 4, 1)
    for got, expected in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(got, expected)


def test_resume_after_moves_equals_the_uninterrupted_run():
    model, says = network(), Says()
    optimizer = Muon(param_groups(model), adapt=says, adapt_every=2)
    says.table[id(model[2].weight)] = 0.1
    train(model, optimizer, 4)
    saved = copy.deepcopy(optimizer.state_dict())
    other, mute = network(), Says()
    other.load_state_dict(model.state_dict())
    resumed = Muon(param_groups(other), adapt=mute, adapt_every=1000)
    resumed.load_state_dict(saved)
    assert update_of(resumed, other[2].weight) == "adamw"
    says.table.clear()
    train(model, optimizer, 3, 4)
    train(other, resumed, 3, 4)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_schedulers_reach_both_sides():
    model, says = network(), Says()
    optimizer = Muon(param_groups(model), adapt=says, adapt_every=1)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 0.5, 10)
    says.table[id(model[0].weight)] = 0.1
    train(model, optimizer, 3)
    scheduler.step()
    assert [round(g["lr"] / i, 6) for g, i in zip(optimizer.param_groups, [0.02, 3e-4, 0.02, 3e-4], strict=False)] == [
        0.5
    ] * len(optimizer.param_groups)


def test_a_probe_is_an_adviser_and_a_failing_condition_a_veto():
    model = network()
    with Probe(model, every=1) as probe:
        optimizer = Muon(param_groups(model), adapt=probe, adapt_every=1)
        train_with(model, optimizer, probe)
        assert probe.evidence(model[0].weight).verdicts
    assert not Evidence(float("nan"), ("fails",)).favours_spectral(True)
    assert Evidence(float("nan"), ("marginal",)).favours_spectral(True)
    assert not Evidence(float("nan"), ("holds",)).favours_spectral(False)


def train_with(model, optimizer, probe):
    for step in range(3):
        model(torch.randn(12, 6, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        probe.step()


@pytest.mark.parametrize(
    "settings, error, message",
    [
        ({"adapt": 3}, TypeError, "`adapt` must be a probe.*got int"),
        ({"adapt": Says(), "adapt_every": 0}, ValueError, "`adapt_every` must be >= 1; got 0"),
        ({"adapt": Says(), "hysteresis": 0.5}, ValueError, "`hysteresis` >= 1; got 1.0 and 0.5"),
    ],
)
def test_bad_settings_are_refused_by_name(settings, error, message):
    with pytest.raises(error, match=message):
        Muon(param_groups(network()), **settings)


def test_rerouting_without_a_probe_says_what_to_do():
    with pytest.raises(RuntimeError, match=r"adapt=probe"):
        Muon(param_groups(network())).reroute()


def test_a_probe_of_another_model_is_refused():
    with pytest.raises(ValueError, match="`adapt` must watch the model of these parameters; it knows none of the 3"):
        Muon(param_groups(network()), adapt=Probe(network()))
