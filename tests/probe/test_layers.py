"""Every kind of layer: what its input matrix is, which blocks it has, and what is refused by name."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from specgrad import Probe
from specgrad.linalg import nuclear_rank, stable_rank
from specgrad.optim import Blocks


def measured(model, inputs, loss=lambda out: out.square().mean(), **settings):
    with Probe(model, every=1, exact=True, **settings) as probe:
        loss(model(*inputs)).backward()
        return {record["layer"]: record for record in probe.step()}


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


CONVOLUTIONS = {
    "plain": (nn.Conv2d(3, 8, 3), (5, 3, 9, 8)),
    "strided, padded": (nn.Conv2d(3, 8, 3, stride=2, padding=1), (4, 3, 9, 8)),
    "dilated": (nn.Conv2d(2, 6, 3, dilation=2, padding=2), (4, 2, 9, 8)),
    "grouped": (nn.Conv2d(4, 6, 3, groups=2), (4, 4, 6, 6)),
    "same, 1d": (nn.Conv1d(3, 5, 4, padding="same"), (4, 3, 11)),
    "reflected": (nn.Conv1d(3, 5, 3, padding=1, padding_mode="reflect"), (4, 3, 11)),
    "3d": (nn.Conv3d(2, 4, 2), (2, 2, 4, 4, 4)),
}


def unfolded(module, x, group):
    """Patches by the definition: pad, then gather every kernel window."""
    if module.padding == "same":
        total = module.dilation[0] * (module.kernel_size[0] - 1)
        x = F.pad(x, (total // 2, total - total // 2))
    else:
        sides = [p for p in reversed(module.padding) for _ in (0, 1)]
        x = F.pad(x, sides, mode="constant" if module.padding_mode == "zeros" else module.padding_mode)
    width = x.shape[1] // module.groups
    x = x[:, group * width : (group + 1) * width]
    for axis, (k, s, d) in enumerate(zip(module.kernel_size, module.stride, module.dilation, strict=True)):
        x = x.unfold(2 + axis, d * (k - 1) + 1, s)[..., ::d]
    n = len(module.kernel_size)
    x = x.permute(0, *range(2, 2 + n), 1, *range(2 + n, 2 + 2 * n))
    return x.reshape(-1, width * torch.tensor(module.kernel_size).prod())


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_convolutions_inputs_are_its_patches(name):
    module, shape = CONVOLUTIONS[name]
    x = random(*shape) + 0.5
    got = list(measured(module, [x]).values())
    assert len(got) == module.groups
    with Probe(module, every=1) as probe:
        module(x).square().mean().backward()
        estimated = probe.step()
    rows = module.weight.shape[0] // module.groups
    for group, record in enumerate(got):
        patches = unfolded(module, x, group)
        assert record["tokens"] == len(patches)
        assert record["stable_rank"] == pytest.approx(stable_rank(patches).item(), rel=1e-5)
        assert estimated[group]["stable_rank"] == pytest.approx(stable_rank(patches).item(), rel=1e-2)
        assert record["outlier_share"] == pytest.approx(
            (patches.square().sum(1).max() / patches.square().sum()).item(), rel=1e-4
        )
        signal = patches.mean(0).square().sum()
        assert record["noise_to_signal"] == pytest.approx((patches.square().sum(1).mean() / signal).item(), rel=1e-4)
        grad = module.weight.grad[group * rows : (group + 1) * rows].flatten(1)
        # Two backward passes of the same batch have added up, which nuclear ranks do not see.
        assert record["nuclear_rank"] == pytest.approx(nuclear_rank(grad).item(), rel=1e-4)
    module.zero_grad()


def test_multihead_attention_is_three_blocks_with_their_own_inputs_and_says_what_hooks_miss():
    model = nn.MultiheadAttention(8, 2, batch_first=True)
    q, k, v = random(3, 5, 8), random(3, 7, 8, seed=1) + 1, random(3, 7, 8, seed=2)
    got = measured(model, [q, k, v], lambda out: out[0].square().mean())
    for i, (name, x) in enumerate((("query", q), ("key", k), ("value", v))):
        record = got[f"in_proj_weight[{name}]"]
        assert record["stable_rank"] == pytest.approx(stable_rank(x.flatten(0, 1)).item(), rel=1e-5)
        grad = model.in_proj_weight.grad[8 * i : 8 * i + 8]
        assert record["nuclear_rank"] == pytest.approx(nuclear_rank(grad).item(), rel=1e-4)
    assert got["out_proj"]["verdict"] == "undefined"
    assert "functionally" in got["out_proj"]["reason"]


def test_multihead_attention_with_other_widths_has_its_separate_projections():
    model = nn.MultiheadAttention(8, 2, kdim=5, vdim=6, batch_first=True)
    got = measured(model, [random(3, 5, 8), random(3, 7, 5), random(3, 7, 6)], lambda out: out[0].square().mean())
    assert {"q_proj_weight", "k_proj_weight", "v_proj_weight"} <= set(got)
    assert got["v_proj_weight"]["stable_rank"] == pytest.approx(stable_rank(random(21, 6)).item(), rel=1e-5)


@pytest.mark.parametrize("norm", [nn.LayerNorm(6), nn.RMSNorm(6)])
def test_a_gain_is_judged_by_its_l1_norm_and_the_normalised_inputs(norm):
    x = random(4, 5, 6) * 3 + 1
    model = nn.Sequential(norm, nn.Linear(6, 4))
    record = measured(model, [x])["0"]
    plain = F.layer_norm(x, (6,)) if isinstance(norm, nn.LayerNorm) else F.rms_norm(x, (6,))
    g = norm.weight.grad
    assert record["nuclear_rank"] == pytest.approx((g.abs().sum() ** 2 / g.square().sum()).item(), rel=1e-5)
    assert record["stable_rank"] == pytest.approx(stable_rank(plain.flatten(0, 1)).item(), rel=1e-5)
    assert record["kind"] == "gain"


def test_declared_blocks_split_outputs_and_inputs():
    model = nn.Linear(6, 9, bias=False)
    x = random(20, 6) + 1
    rows = measured(model, [x], blocks={"weight": Blocks(rows=3)})
    assert list(rows) == ["weight[0]", "weight[1]", "weight[2]"]
    assert rows["weight[1]"]["nuclear_rank"] == pytest.approx(nuclear_rank(model.weight.grad[3:6]).item(), rel=1e-4)
    model.zero_grad()
    cols = measured(model, [x], blocks={"weight": Blocks(cols=(2, 4))})
    assert cols["weight[1]"]["stable_rank"] == pytest.approx(stable_rank(x[:, 2:]).item(), rel=1e-4)
    assert cols["weight[1]"]["nuclear_rank"] == pytest.approx(nuclear_rank(model.weight.grad[:, 2:]).item(), rel=1e-4)


def test_a_module_called_twice_is_measured_on_all_its_inputs():
    model = nn.Linear(5, 5, bias=False)
    x, y = random(7, 5), random(9, 5, seed=1) + 2
    with Probe(model, every=1, exact=True) as probe:
        (model(x).square().mean() + model(y).square().mean()).backward()
        (record,) = probe.step()
    assert record["tokens"] == 16
    assert record["stable_rank"] == pytest.approx(stable_rank(torch.cat([x, y])).item(), rel=1e-5)


def test_one_weight_in_two_linear_modules_is_one_layer_on_all_inputs():
    model = nn.Sequential(nn.Linear(5, 5, bias=False), nn.Tanh(), nn.Linear(5, 5, bias=False))
    model[2].weight = model[0].weight
    x = random(7, 5)
    got = measured(model, [x])
    assert list(got) == ["0"]
    both = torch.cat([x, model[:2](x).detach()])
    assert got["0"]["stable_rank"] == pytest.approx(stable_rank(both).item(), rel=1e-5)


class Core(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(6, 6, bias=False) for _ in range(4))

    def forward(self, x):
        mixed = torch.softmax(self.q_proj(x) @ self.k_proj(x).mT, dim=-1) @ self.v_proj(x)
        return self.o_proj(mixed)


def test_the_attention_output_is_reported_against_its_core_activation_too():
    x = random(3, 7, 6) + 0.5
    got = measured(Core(), [x])
    record = got["o_proj"]
    assert record["core_stable_rank"] == pytest.approx(got["v_proj"]["stable_rank"])
    assert record["core_ratio"] == pytest.approx(record["nuclear_rank"] / record["core_stable_rank"])
    assert record["stable_rank"] != record["core_stable_rank"]
    assert got["v_proj"]["core_ratio"] != got["v_proj"]["core_ratio"]


@pytest.mark.parametrize(
    "module, name, reason",
    [
        (nn.GRU(4, 4), "extra.weight_ih_l0", "GRU: recurrent weights"),
        (nn.LSTM(4, 4), "extra.weight_hh_l0", "LSTM: recurrent weights"),
        (nn.LSTMCell(4, 4), "extra.weight_hh", "recurrent cell"),
        (nn.EmbeddingBag(4, 4), "extra.weight", "EmbeddingBag: sums"),
        (nn.ConvTranspose2d(4, 4, 3), "extra.weight", "transposed convolution"),
        (nn.Conv2d(4, 4, 3, groups=4), "extra.weight", "depthwise kernel"),
        (nn.BatchNorm2d(4), "extra.weight", "no matrix with inputs"),
        (nn.Bilinear(4, 4, 4), "extra.weight", "two inputs"),
        (nn.Linear(4, 4), "extra.bias", "extra input row of ones"),
    ],
)
def test_what_is_not_probed_is_listed_with_its_reason(module, name, reason):
    probe = Probe(nn.ModuleDict({"linear": nn.Linear(4, 4), "extra": module}))
    assert reason in probe.skipped[name]


@pytest.mark.parametrize("kind", [torch.bool, torch.int64])
def test_a_padding_mask_leaves_positions_out(kind):
    model = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 4, bias=False))
    ids = torch.randint(11, (3, 8), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(8) < torch.tensor([[8], [5], [3]])
    with Probe(model, every=1, exact=True) as probe:
        probe.mask(mask.to(kind))
        (model(ids).square().sum(-1) * mask).mean().backward()
        got = {record["layer"]: record for record in probe.step()}
    assert got["0"]["tokens"] == got["1"]["tokens"] == 16
    assert got["1"]["stable_rank"] == pytest.approx(stable_rank(model[0](ids)[mask]).item(), rel=1e-5)
    assert got["0"]["stable_rank"] == 16 / ids[mask].bincount().max().item()


def test_sparse_gradients_of_embeddings_are_measured():
    model = nn.Embedding(50, 8, sparse=True)
    ids = torch.tensor([1, 1, 3, 7])
    record = measured(model, [ids])["weight"]
    assert record["nuclear_rank"] == pytest.approx(nuclear_rank(model.weight.grad.to_dense()).item(), rel=1e-4)
    assert record["stable_rank"] == 2


def test_spectra_are_kept_at_the_steps_asked_for():
    model = nn.Linear(5, 3, bias=False)
    with Probe(model, every=100, spectra_at=[2]) as probe:
        for step in range(4):
            x = random(20, 5, seed=step)
            model(x).square().mean().backward()
            probe.step()
            if step == 2:
                expected = torch.linalg.svdvals(x)
            model.zero_grad()
    (spectrum,) = probe.spectra
    assert spectrum["step"] == 2
    assert spectrum["inputs"] == pytest.approx((expected.square() / expected.square().sum()).tolist(), rel=1e-4)
    assert len(spectrum["gradient"]) == 3


def test_a_mask_that_fits_nothing_or_is_no_mask_is_refused():
    model = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 3))
    with Probe(model, every=1) as probe:
        with pytest.raises(TypeError, match=r"`positions` of `Probe.mask` must be boolean, or 0 and 1; got torch.float32"):
            probe.mask(torch.ones(4, 5))
        probe.mask(torch.ones(4, 6, dtype=torch.bool))
        model(torch.randint(9, (4, 5))).sum().backward()
        with pytest.raises(ValueError, match=r"shape \(4, 6\) fits none"):
            probe.step()


def test_a_table_of_position_biases_is_not_called_a_bias():
    class Windowed(nn.Module):
        def __init__(self):
            super().__init__()
            self.relative_position_bias_table = nn.Parameter(torch.zeros(9, 2))
            self.linear = nn.Linear(2, 2)

    skipped = Probe(Windowed()).skipped
    assert "module whose inputs are not known" in skipped["relative_position_bias_table"]
    assert "row of ones" in skipped["linear.bias"]
