"""What a report says: predictions, line searches and advice, and why something is missing."""

import math
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from specgrad import Probe, gpt
from specgrad.probe import Likelihood, audit, measure_advantage, measure_gain, summarise_layers
from specgrad.probe.advice import next_steps

TASK = gpt.Task(size="tiny", batch_size=8)


def test_measurements_enter_the_report_and_are_audited():
    torch.manual_seed(0)
    x, y = torch.randn(200, 12) + 0.7, torch.randn(200, 7)
    model = nn.Sequential(nn.Linear(12, 7), nn.Tanh(), nn.Linear(7, 7))
    with Probe(model, every=1) as probe:
        F.mse_loss(model(x), y).backward()
        probe.step()
        probe.measure_advantage(x, y, "mse")
        probe.measure_gain(x, y, "mse")
    report = probe.report()
    assert {record["step"] for record in report.advantages} == {1}
    assert [row["layer"] for row in report.audit().rows] == ["0", "2"]
    assert "Predicted advantage of a spectral step" in report.summary()
    assert "predicted" in str(report) and "realised" in str(report)
    advice = " ".join(report.next_steps())
    weak = [layer.layer for layer in report.layers if layer.advantage < 1]
    assert ("Muon(report.param_groups())" in advice) == (not weak)
    assert all(math.isfinite(layer.advantage) and math.isfinite(layer.gain) for layer in report.layers)


def test_a_report_tells_predictions_that_level_1_knows_nothing_of_and_why_others_are_missing():
    batch = TASK.batch(0)
    model = TASK.model()
    probe = Probe(model)
    probe.measure_advantage(batch[:, :-1], batch[:, 1:], method="gauss_newton", pattern="attention")
    refused = {row["layer"] for row in probe.advantages if "no quadratic regime" in row["reason"]}
    assert refused
    report = probe.report()
    assert report.summary().startswith("The condition was not measured.")
    for layer in report.layers:
        assert ("no predicted advantage, no quadratic regime" in str(layer)) == (layer.layer in refused)
        assert math.isnan(layer.advantage) == (layer.layer in refused)
    advice = " ".join(report.next_steps())
    assert "No quadratic model describes the loss yet on" in advice
    assert "No verdict on" not in advice


def test_the_last_prediction_counts_even_where_it_gave_no_value():
    about = {"layer": "a", "kind": "linear", "rows": 2, "cols": 2, "log_error": 0.1}
    known = about | {"step": 0, "advantage": 2.0, "reason": ""}
    lost = about | {"step": 9, "advantage": math.nan, "reason": "its gradient is zero or not finite"}
    (layer,) = summarise_layers([], [known, lost])
    assert math.isnan(layer.advantage)
    assert layer.advantage_reason == lost["reason"]
    (layer,) = summarise_layers([], [lost, known])
    assert layer.advantage == 2.0


def test_advice_does_not_contradict_the_routing():
    about = {"step": 0, "layer": "a", "kind": "linear", "rows": 2, "cols": 2, "tokens": 9, "reason": ""}
    condition = about | {"stable_rank": 8.0, "nuclear_rank": 2.0, "ratio": 0.25, "verdict": "fails"}
    assert "Keep a with AdamW" in " ".join(next_steps(summarise_layers([condition]), 0))
    predicted = about | {"advantage": 1.7, "log_error": 0.1}
    advice = " ".join(next_steps(summarise_layers([condition], [predicted]), 0))
    assert "AdamW" not in advice
    assert "gain more than a Euclidean one (advantage > 1) on a" in advice


def test_an_audit_without_common_layers_says_so():
    assert str(audit([], [])) == "No layer has both a prediction and a line search of the same step."


def test_outputs_that_are_no_tensor_are_refused_with_the_way_out():
    class Named(nn.Module):
        def __init__(self, name):
            super().__init__()
            self.linear, self.name = nn.Linear(6, 3), name

        def forward(self, x):
            return {self.name: self.linear(x)}

    x, y = torch.randn(8, 6), torch.zeros(8).long()
    with pytest.raises(TypeError, match=r"`model` must return a tensor.*Give `forward`"):
        measure_advantage(Named("scores"), x, y)
    assert measure_advantage(Named("logits"), x, y)[0]["reason"] == ""
    assert measure_advantage(Named("scores"), x, y, forward=lambda model, x: model(x)["scores"])[0]["reason"] == ""


@pytest.mark.parametrize(
    "loss, reason",
    [
        (lambda f: -f, r"has no minimum along -G up to a step of"),
        (lambda f: torch.where(f == 0, 0 * f, 1 + f.abs()), r"does not fall along -G from a step of"),
    ],
)
def test_a_line_search_without_a_minimum_says_what_the_loss_does(loss, reason):
    class Along(torch.autograd.Function):
        """A loss with slope -1 at zero, whatever it is elsewhere."""

        @staticmethod
        def forward(ctx, f):
            return loss(f)

        @staticmethod
        def backward(ctx, grad):
            return -grad

    def no_score(f, y, generator):
        raise NotImplementedError

    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    likelihood = Likelihood("odd", lambda f, y: Along.apply(f).sum(), lambda f, y: 1.0, no_score)
    (record,) = measure_gain(model, torch.ones(1, 1), torch.ones(1, 1), likelihood)
    assert re.search(reason, record["reason"])
    assert math.isnan(record["gain"])
