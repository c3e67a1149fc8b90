"""Real training loops: compiled, checkpointed, scaled, accumulated; what the probe costs and what it leaves behind."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from specgrad import Probe
from specgrad.linalg import stable_rank
from specgrad.optim import Muon, param_groups


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


def data(step=0, n=20):
    return torch.randn(n, 6, generator=torch.Generator().manual_seed(step)) + 0.5


def ranks(records):
    return {r["layer"]: (r["tokens"], r["stable_rank"], r["nuclear_rank"]) for r in records}


def close(first, second):
    assert set(first) == set(second)
    for name, values in first.items():
        assert values == pytest.approx(second[name], rel=1e-4), name


class Checkpointed(nn.Module):
    def __init__(self, body, reentrant):
        super().__init__()
        self.body, self.reentrant = body, reentrant

    def forward(self, x):
        return checkpoint(self.body, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("calls", [1, 2])
def test_the_recomputation_of_checkpointing_is_not_counted_twice(reentrant, calls):
    found = []
    for wrap in (False, True):
        body = network()
        model = Checkpointed(body, reentrant) if wrap else body
        with Probe(body, every=1, exact=True) as probe:
            for call in range(calls):
                model(data(call).requires_grad_()).square().mean().backward()
            found.append(ranks(probe.step()))
    close(*found)
    assert found[0]["0"][0] == 20 * calls


class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = network()

    def forward(self, x):
        return self.body(x)


@pytest.mark.parametrize("order", ["compile first", "attach first", "in place"])
def test_compiled_models_are_measured_whatever_the_order(order):
    graphs = []

    def backend(graph, example):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    model = Wrapped()
    compiled = torch.compile(model, backend=backend) if order == "compile first" else model
    if order == "in place":
        model.compile(backend=backend)
    measured = []
    with Probe(compiled, every=3, exact=True) as probe:
        if order == "attach first":
            compiled = torch.compile(model, backend=backend)
        for step in range(8):
            compiled(data(step)).square().mean().backward()
            measured += probe.step()
            model.zero_grad()
    plain = Wrapped()
    expected = []
    with Probe(plain, every=3, exact=True) as probe:
        for step in range(8):
            plain(data(step)).square().mean().backward()
            expected += probe.step()
            plain.zero_grad()
    for step in (0, 3, 6):
        close(ranks(r for r in measured if r["step"] == step), ranks(r for r in expected if r["step"] == step))
    # One graph for all unmeasured steps: measuring does not recompile.
    assert len(graphs) == 1
    torch._dynamo.reset()


def test_a_model_compiled_inside_an_unsuspecting_step_is_measured_at_the_next(monkeypatch):
    model = network()
    with Probe(model, every=10) as probe:
        # What remains of hooks that were compiled away: gradients, and no call seen.
        monkeypatch.setattr(probe._eager, "_stance", None)
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
        out = model(data())
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: False)
        out.square().mean().backward()
        assert probe.step() == []
        model(data(1)).square().mean().backward()
        assert {r["step"] for r in probe.step()} == {1}


def test_a_scaled_loss_has_the_same_ranks_and_an_overflow_is_counted_and_measured_again():
    model, plain = network(), network()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Probe(model, every=5, exact=True) as probe, Probe(plain, every=5, exact=True) as reference:
        for step in range(2):
            loss = model(data()).square().mean()
            scaler.scale(loss * (torch.inf if step == 0 else 1)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            got = probe.step()
            assert bool(got) == (step == 1)
        plain(data()).square().mean().backward()
        close(ranks(got), ranks(reference.step()))
    assert probe.overflows == 1
    assert "1 measured steps were left out" in str(probe.report())


def test_a_report_after_nothing_but_overflows_says_so():
    model = network()
    with Probe(model, every=1) as probe:
        (model(data()).sum() * torch.nan).backward()
        probe.step()
        with pytest.raises(RuntimeError, match=r"1 measured steps had gradients that are not finite"):
            probe.report()


def test_a_measured_step_without_backward_is_an_error_that_says_what_to_do():
    model = network()
    with Probe(model, every=1) as probe:
        model(data())
        with pytest.raises(RuntimeError, match=r"call it after loss.backward\(\)"):
            probe.step()


def test_there_are_no_hooks_between_measured_steps():
    model = network()

    def hooks():
        return sum(len(m._forward_pre_hooks) for m in model.modules()) + sum(
            len(p._post_accumulate_grad_hooks or ()) for p in model.parameters()
        )

    with Probe(model, every=3) as probe:
        counts = []
        for step in range(7):
            counts.append(hooks())
            model(data(step)).square().mean().backward()
            probe.step()
    assert counts == [6, 0, 0, 6, 0, 0, 6]
    assert hooks() == 0


@pytest.mark.parametrize("exact", [True, False])
def test_weights_are_bitwise_those_of_an_unprobed_run_with_dropout_and_micro_batches(exact):
    results = []
    for probed in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 3))
        optimizer = Muon(param_groups(model))
        probe = Probe(model, every=2, exact=exact)
        if probed:
            probe.attach()
        for step in range(6):
            for part in data(step).chunk(2):
                model(part).square().mean().backward()
            if probed and step == 3:
                targets = torch.zeros(20, 3)
                probe.measure_advantage(data(step), targets, "mse", draws=2)
                probe.measure_gain(data(step), targets, "mse")
            optimizer.step()
            optimizer.zero_grad()
            if probed:
                probe.step()
        results.append([*(p.detach().clone() for p in model.parameters()), torch.rand(3)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("exact", [True, False])
def test_no_activation_outlives_its_layers_call(exact):
    model = network()
    alive = []

    def remember(module, args):
        alive.append(weakref.ref(args[0]))

    for module in (model[2], model[4]):
        module.register_forward_pre_hook(remember)
    with Probe(model, every=1, exact=exact) as probe:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: None, lambda t: t):
            out = model(data())
        del out
        gc.collect()
        assert [ref() for ref in alive] == [None, None]
        model(data()).square().mean().backward()
        probe.step()


def test_micro_batches_are_added_up_and_not_averaged():
    x = torch.cat([data(0) + 3, data(1) - 3])
    model = nn.Linear(6, 4, bias=False)
    with Probe(model, every=1) as probe:
        for part in x.chunk(2):
            model(part).square().mean().backward()
        (record,) = probe.step()
    parts = [stable_rank(part).item() for part in x.chunk(2)]
    assert record["stable_rank"] == pytest.approx(stable_rank(x).item(), rel=0.02)
    assert record["stable_rank"] < min(parts) * 1.5


def test_trackers_get_finite_numbers_by_layer_and_quantity():
    seen = []
    model = network()
    with Probe(model, every=2, on_record=lambda step, record: seen.append((step, record))) as probe:
        for step in range(3):
            model(data(step)).square().mean().backward()
            probe.step()
    assert [step for step, _ in seen] == [0, 2]
    assert seen[0][1]["0/ratio"] == probe.records[0]["ratio"]
    assert all(isinstance(v, int | float) for v in seen[0][1].values())


def test_shardwise_ranks_are_reported_on_request():
    model = network()
    with Probe(model, every=1, shards=2) as probe:
        model(data()).square().mean().backward()
        for record in probe.step():
            nuclear = record["nuclear_rank"]
            assert nuclear / 2 <= record["shardwise_nuclear_rank"] * (1 + 1e-9) <= nuclear * (1 + 1e-8)


def test_report_routes_by_advantage_and_vetoes_where_the_condition_fails():
    model = network()
    with Probe(model, every=1) as probe:
        model(data()).square().mean().backward()
        probe.step()
    for record in probe.records:
        record["verdict"] = "fails" if record["layer"] == "0" else "holds"
    routes = {r.name: r for r in probe.report().param_groups().routes}
    assert routes["0.weight"].update == "adamw"
    assert "fails" in routes["0.weight"].reason
    assert routes["2.weight"].update == "spectral"
    about = {"step": 9, "log_error": 0.1, "reason": ""}
    probe.advantages = [
        about | {"layer": n, "parameter": f"{n}.weight", "advantage": a} for n, a in (("0", 1.5), ("2", 0.7), ("4", 2.0))
    ]
    groups = probe.report().param_groups()
    routes = {r.name: r.update for r in groups.routes}
    assert routes["0.weight"] == "spectral"
    assert routes["2.weight"] == "adamw"
    assert {r.name: r.update for r in probe.report().param_groups(overrides={"2.weight": "spectral"}).routes}[
        "2.weight"
    ] == "spectral"
    assert {r.name: r.update for r in probe.report().param_groups(threshold=1.8).routes}["0.weight"] == "adamw"
    Muon(groups)
    with pytest.raises(ValueError, match=r"`threshold`.*got 0"):
        probe.report().param_groups(threshold=0.0)


def test_notebooks_get_a_table():
    model = network()
    with Probe(model, every=1) as probe:
        model(data()).square().mean().backward()
        probe.step()
    assert "<table" in probe.report()._repr_html_()


def test_a_resumed_probe_measures_bit_for_bit_as_an_uninterrupted_one(tmp_path):
    def measure(model, probe, steps):
        for step in steps:
            model(data(step)).square().mean().backward()
            probe.step()
            model.zero_grad()

    model = network()
    with Probe(model, every=2) as probe:
        measure(model, probe, range(8))
    first, second = Probe(model, every=2), Probe(model, every=2)
    with first:
        measure(model, first, range(3))
    torch.save(first.state_dict(), tmp_path / "probe.pt")
    second.load_state_dict(torch.load(tmp_path / "probe.pt", weights_only=True))
    with second:
        measure(model, second, range(3, 8))
    assert repr(second.records) == repr(probe.records)
