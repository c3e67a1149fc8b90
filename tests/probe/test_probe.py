import copy

import pytest
import torch
from torch import nn

from specgrad import Probe
from specgrad.linalg import nuclear_rank, stable_rank
from specgrad.optim import Blocks, Muon, param_groups


class Attention(nn.Module):
    """Embedding, three projections of one input, a head: shared inputs and every kind of layer."""

    def __init__(self, vocabulary=13, width=6):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids):
        x = self.embedding(ids)
        mixed = torch.softmax(self.query(x) @ self.key(x).mT, dim=-1) @ self.value(x)
        return self.head(self.norm(x + mixed))


def fresh():
    torch.manual_seed(0)
    return Attention()


def batch(seed=0):
    return torch.randint(13, (4, 5), generator=torch.Generator().manual_seed(seed))


def loss_of(model, ids):
    return nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.roll(1, 1).flatten())


def by_layer(records):
    return {record["layer"]: record for record in records}


def test_ranks_are_those_of_the_inputs_and_gradients_computed_directly():
    model, ids = fresh(), batch()
    with Probe(model, every=1, exact=True) as probe:
        loss_of(model, ids).backward()
        got = by_layer(probe.step())
    assert list(got) == ["embedding", "query", "key", "value", "norm", "head"]
    x = model.embedding(ids).flatten(0, 1).double()
    for name in ("query", "key", "value"):
        assert got[name]["stable_rank"] == pytest.approx(stable_rank(x).item(), rel=1e-5)
        assert got[name]["tokens"] == 20
    for name, record in got.items():
        grad = model.get_submodule(name).weight.grad
        grad = grad.diag() if name == "norm" else grad
        assert record["nuclear_rank"] == pytest.approx(nuclear_rank(grad).item(), rel=1e-5)
        assert record["ratio"] == pytest.approx(record["nuclear_rank"] / record["stable_rank"])
    assert got["embedding"]["stable_rank"] == 20 / ids.flatten().bincount().max().item()


def test_gradients_are_measured_whether_step_comes_before_or_after_zero_grad_clipping_or_the_optimizer():
    ranks = []
    for set_to_none in (True, False):
        model = fresh()
        optimizer = Muon(param_groups(model), lr=0.1)
        with Probe(model, every=1) as probe:
            loss_of(model, batch()).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
            ranks.append([record["nuclear_rank"] for record in probe.step()])
    assert ranks[0] == ranks[1]
    model = fresh()
    with Probe(model, every=1) as probe:
        loss_of(model, batch()).backward()
        assert [record["nuclear_rank"] for record in probe.step()] == ranks[0]


def test_micro_batches_are_measured_as_one_batch():
    whole, parts = fresh(), fresh()
    ids = torch.cat([batch(1), batch(2)])
    with Probe(whole, every=1, exact=True) as probe:
        loss_of(whole, ids).backward()
        expected = by_layer(probe.step())
    with Probe(parts, every=1, exact=True) as probe:
        for part in ids.split(4):
            (loss_of(parts, part) / 2).backward()
        got = by_layer(probe.step())
    for name, record in got.items():
        assert record["tokens"] == expected[name]["tokens"] == 40
        assert record["stable_rank"] == pytest.approx(expected[name]["stable_rank"], rel=1e-5)
        assert record["nuclear_rank"] == pytest.approx(expected[name]["nuclear_rank"], rel=1e-4)


def test_an_input_changed_in_place_between_two_layers_is_measured_twice():
    model = nn.ModuleDict({"first": nn.Linear(3, 2, bias=False), "second": nn.Linear(3, 2, bias=False)})
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    expected = [stable_rank(x).item()]
    with Probe(model, every=1) as probe:
        model["first"](x)
        with torch.no_grad():
            x[0] *= 100
        expected.append(stable_rank(x).item())
        (model["first"].weight.sum() + model["second"](x).sum()).backward()
        got = probe.step()
    assert [record["stable_rank"] for record in got] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_does_not_round_the_measurement(dtype):
    model = nn.Linear(16, 8, bias=False)
    inputs = torch.randn(3000, 16, generator=torch.Generator().manual_seed(0)) * 3 + 2
    with Probe(model, every=1) as probe:
        with torch.autocast("cpu", dtype=dtype):
            model(inputs).float().square().mean().backward()
        (record,) = probe.step()
    assert record["stable_rank"] == pytest.approx(stable_rank(inputs).item(), rel=1e-5)


@pytest.mark.parametrize("scale", [1e-24, 1e20])
def test_inputs_at_the_edges_of_float32_have_their_stable_rank(scale):
    model = nn.Linear(4, 3, bias=False)
    inputs = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    with Probe(model, every=1) as probe:
        (model(inputs * scale) / scale).sum().backward()
        (record,) = probe.step()
    assert record["stable_rank"] == pytest.approx(stable_rank(inputs).item(), rel=1e-5)


def test_copies_and_pickles_of_a_probed_model_are_not_probed(tmp_path):
    model = nn.Linear(4, 3, bias=False)
    with Probe(model, every=1) as probe:
        twin = copy.deepcopy(model)
        torch.save(model, tmp_path / "model.pt")
        loaded = torch.load(tmp_path / "model.pt", weights_only=False)
        model(torch.ones(5, 4)).sum().backward()
        for other in (twin, loaded):
            other(torch.randn(7, 4)).sum().backward()
        (record,) = probe.step()
    assert record["tokens"] == 5
    assert record["stable_rank"] == pytest.approx(1)


def test_parametrised_layers_are_left_out_with_a_reason_and_the_others_are_probed():
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    nn.utils.parametrizations.weight_norm(model[0])
    probe = Probe(model)
    assert [layer.name for layer in probe.layers] == ["1"]
    assert any("parametrizations" in name for name in probe.skipped)


def test_evaluation_without_gradients_is_not_counted():
    model = fresh()
    with Probe(model, every=1) as probe:
        with torch.no_grad():
            model(batch(3))
        loss_of(model, batch()).backward()
        assert {record["tokens"] for record in probe.step()} == {20}


def test_only_every_nth_step_and_forced_steps_are_measured():
    model = fresh()
    with Probe(model, every=3) as probe:
        for step in range(8):
            if step == 7:
                probe.measure_now()
            loss_of(model, batch(step)).backward()
            probe.step()
    assert sorted({record["step"] for record in probe.records}) == [0, 3, 6, 7]


def test_weights_and_random_numbers_are_bitwise_the_same_with_and_without_the_probe():
    results = []
    for probed in (True, False):
        model = fresh()
        optimizer = Muon(param_groups(model))
        probe = Probe(model, every=2)
        if probed:
            probe.attach()
        for step in range(5):
            loss_of(model, batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if probed:
                probe.step()
        results.append([*(p.detach().clone() for p in model.parameters()), torch.rand(3)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_hooks_are_gone_on_exit_and_after_an_exception():
    model = fresh()
    with pytest.raises(RuntimeError, match=r"mine"), Probe(model, every=1):
        raise RuntimeError("mine")
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    copy.deepcopy(model)


def test_a_layer_that_did_not_run_is_reported_with_the_reason_instead_of_stale_values():
    model = fresh()
    spare = nn.ModuleDict({"used": model, "spare": nn.Linear(3, 3)})
    with Probe(spare, every=1) as probe:
        loss_of(model, batch()).backward()
        record = by_layer(probe.step())["spare"]
    assert record["verdict"] == "undefined"
    assert "never fired" in record["reason"]


def test_a_zero_gradient_has_no_verdict():
    model = nn.Linear(3, 2, bias=False)
    with Probe(model, every=1) as probe:
        (model(torch.ones(4, 3)) * 0).sum().backward()
        (record,) = probe.step()
    assert record["verdict"] == "undefined"
    assert "gradient is zero" in record["reason"]


def test_every_parameter_is_probed_or_listed_with_a_reason():
    model = fresh()
    model.key.requires_grad_(False)
    probe = Probe(model)
    named = {f"{layer.name}.weight" for layer in probe.layers} | set(probe.skipped)
    assert named == {name for name, _ in model.named_parameters()}
    assert "frozen" in probe.skipped["key.weight"]
    assert "bias" in probe.skipped["norm.bias"]


def test_both_uses_of_a_tied_embedding_are_reported_without_a_verdict():
    model = fresh()
    model.head.weight = model.embedding.weight
    with Probe(model, every=1) as probe:
        loss_of(model, batch()).backward()
        got = by_layer(probe.step())
    for name in ("embedding", "head"):
        assert got[name]["verdict"] == "undefined"
        assert "tied" in got[name]["reason"]
        assert got[name]["stable_rank"] >= 1
    assert got["embedding"]["nuclear_rank"] == got["head"]["nuclear_rank"]
    assert got["embedding"]["stable_rank"] != got["head"]["stable_rank"]


@pytest.mark.parametrize(
    "model, arguments, message",
    [
        (nn.Linear(2, 2), {"every": 0}, "`every` of `Probe` must be an integer >= 1; got 0"),
        (nn.ReLU(), {}, "`model` must contain a trainable matrix such as a Linear or Embedding; got modules ReLU"),
        (nn.Linear(2, 2), {"pattern": "mlp"}, "name matching 'mlp'"),
        (nn.LayerNorm(2), {}, "norm gains only"),
        (nn.Linear(2, 2), {"shards": 0}, "`shards` of `Probe` must be an integer >= 1; got 0"),
        (nn.Linear(2, 2), {"blocks": {"qkv": Blocks(rows=3)}}, "pattern 'qkv', which matches no probed parameter"),
        (nn.Linear(2, 2), {"blocks": {"weight": Blocks(rows=3)}}, "weight must have an axis divisible into 3"),
        (nn.DataParallel(nn.Linear(2, 2)), {}, "must not be a DataParallel"),
        (nn.GRU(2, 2), {}, "trainable matrix.*got modules GRU"),
        (nn.Linear(2, 2).requires_grad_(False), {}, r"got modules Linear \(frozen: no gradient to rank\)"),
        (nn.Linear(2, 2, dtype=torch.complex64), {}, r"complex: ranks are measured on real matrices only"),
        (nn.Linear(2, 2), {"pattern": "("}, r"`pattern` must be a regular expression; got '\('"),
    ],
)
def test_bad_requests_are_refused_by_name(model, arguments, message):
    with pytest.raises(ValueError, match=message):
        Probe(model, **arguments)


def test_step_without_hooks_and_report_without_measurements_say_what_to_do():
    probe = Probe(fresh())
    with pytest.raises(RuntimeError, match=r"attach"):
        probe.step()
    with pytest.raises(RuntimeError, match=r"at least one measured step"):
        probe.report()


def test_report_prints_every_layer_with_formula_threshold_and_caveat_and_saves_all_formats(tmp_path):
    model = fresh()
    with Probe(model, every=1) as probe:
        for step in range(3):
            loss_of(model, batch(step)).backward()
            probe.step()
    report = probe.report()
    lines = str(report)
    assert all(layer.layer in lines for layer in report.layers)
    assert "norm.bias, head.bias: not probed" in lines
    assert "does not rank the layers" in " ".join(lines.split())
    assert [layer.measured for layer in report.layers] == [3] * 6
    assert len(report.save(tmp_path / "probe.csv").read_text().splitlines()) == 19
    assert len(report.save(tmp_path / "probe.jsonl").read_text().splitlines()) == 18
    assert "<table" in report.save(tmp_path / "probe.html").read_text()
    with pytest.raises(ValueError, match=r"\.csv, \.jsonl or \.html"):
        report.save(tmp_path / "probe.txt")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_models_of_every_dtype_have_the_ranks_of_their_stored_inputs_and_gradients(dtype):
    model = nn.Linear(16, 8, bias=False).to(dtype)
    inputs = (torch.randn(300, 16, generator=torch.Generator().manual_seed(0)) * 3 + 2).to(dtype)
    with Probe(model, every=1, exact=True) as probe:
        # Entries near 1000, whose sum lies beyond the range of float16.
        (model(inputs) * 20).sum().backward()
        (record,) = probe.step()
    assert probe.overflows == 0
    assert record["stable_rank"] == pytest.approx(stable_rank(inputs).item(), rel=1e-5)
    assert record["nuclear_rank"] == pytest.approx(nuclear_rank(model.weight.grad).item(), rel=1e-5)
