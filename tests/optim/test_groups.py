import pytest
import torch
from torch import nn

from specgrad.gpt import SIZES, Decoder
from specgrad.optim import Blocks, param_groups, shape_factor


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(20, 8)
        self.norm = nn.LayerNorm(8)
        self.hidden = nn.Linear(8, 8)
        self.out = nn.Linear(8, 20, bias=False)
        self.out.weight = self.tokens.weight
        self.frozen = nn.Linear(8, 4, bias=False).requires_grad_(False)
        self.taps = nn.Conv1d(8, 8, 3, groups=8, bias=False)


def routes(model, **arguments):
    return {r.name: (r.update, r.reason) for r in param_groups(model, **arguments).routes}


def test_a_decoder_gives_hidden_matrices_to_the_spectral_update_and_embedding_and_head_to_adamw():
    got = routes(Decoder(SIZES["tiny"], positions="learned"))
    adamw = {name for name, (update, _) in got.items() if update == "adamw"}
    assert adamw == {"embedding.weight", "position.weight", "head.weight"}
    assert sum(update == "spectral" for update, _ in got.values()) == 2 * 6


def test_every_parameter_is_reported_once_with_its_reason():
    model = Tied()
    got = routes(model)
    assert list(got) == [name for name, _ in model.named_parameters()]
    assert got["tokens.weight"] == ("adamw", "embedding tied to an output head")
    assert got["hidden.weight"][0] == "spectral"
    assert got["hidden.bias"] == ("adamw", "bias of a Linear")
    assert got["norm.weight"] == ("adamw", "gain of a LayerNorm")
    assert got["frozen.weight"][0] == "frozen"
    assert got["taps.weight"][0] == "adamw"
    grouped = [name for group in param_groups(model) for name, _ in group["params"]]
    assert sorted(grouped) == sorted(name for name in got if name != "frozen.weight")


def test_an_untied_head_is_recognised_by_the_vocabulary_or_by_its_name():
    by_size = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 20))
    assert routes(by_size)["2.weight"][0] == "adamw"
    by_name = nn.ModuleDict({"body": nn.Linear(8, 8), "head": nn.Linear(8, 3)})
    assert routes(by_name)["head.weight"] == ("adamw", "output head by its name")


def test_hidden_layers_as_wide_as_a_table_of_positions_is_long_are_no_heads():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens = nn.Embedding(50, 16)
            self.positions = nn.Embedding(16, 16)
            self.hidden = nn.Linear(16, 16, bias=False)
            self.out = nn.Linear(16, 50, bias=False)

    model = Model()
    assert routes(model)["hidden.weight"][0] == "spectral"
    assert routes(model)["out.weight"][0] == "adamw"
    model.out.weight = model.tokens.weight
    assert routes(model)["hidden.weight"][0] == "spectral"


def test_convolutions_attention_and_foreign_layers_are_routed_by_their_kind():
    class Conv1D(nn.Module):  # as in GPT-2: stored inputs x outputs
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(8, 24))

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.stack = nn.Parameter(torch.zeros(4, 8, 8))

    model = nn.ModuleDict(
        {
            "conv": nn.Conv2d(8, 8, 3),
            "grouped": nn.Conv2d(8, 8, 3, groups=2),
            "depthwise": nn.Conv2d(8, 8, 3, groups=8),
            "attention": nn.MultiheadAttention(8, 2),
            "fused": Conv1D(),
            "experts": Experts(),
            "lora": nn.Linear(2048, 8),
            "score": nn.Linear(8, 1),
            "recurrent": nn.GRU(8, 8),
        }
    )
    by_name = {r.name: r for r in param_groups(model).routes}
    assert by_name["conv.weight"].blocks == Blocks("flatten")
    assert by_name["grouped.weight"].blocks == Blocks("flatten", rows=2)
    assert by_name["depthwise.weight"].reason == "depthwise kernel of a Conv2d"
    assert by_name["attention.in_proj_weight"].blocks == Blocks(rows=3)
    assert by_name["attention.in_proj_bias"].update == "adamw"
    assert by_name["attention.out_proj.weight"].update == "spectral"
    assert by_name["fused.weight"].blocks == Blocks(transposed=True)
    assert "declare `blocks`" in by_name["experts.stack"].reason
    assert by_name["lora.weight"].reason == "aspect ratio 256, above 128"
    assert by_name["score.weight"].reason == "a single row"
    assert by_name["recurrent.weight_ih_l0"].update == "adamw"
    declared = {r.name: r for r in param_groups(model, blocks={"experts": Blocks("batch"), "fused": Blocks(cols=3)}).routes}
    assert declared["experts.stack"].update == declared["fused.weight"].update == "spectral"
    assert declared["fused.weight"].reason == "declared by 'fused'"


def test_norm_gains_can_be_given_to_the_sign_update():
    groups = param_groups(Tied(), overrides={"norm.weight": "sign"})
    assert next(g for g in groups if g["update"] == "sign")["params"][0][0] == "norm.weight"


def test_overrides_take_the_first_pattern_found_in_the_name():
    got = routes(Tied(), overrides={r"hidden\.weight": "adamw", "hidden": "adamw", "tokens": "spectral"})
    assert got["hidden.weight"] == ("adamw", r"override 'hidden\\.weight'")
    assert got["tokens.weight"][0] == "spectral"


def test_the_report_is_a_table_of_parameter_shape_update_reason():
    lines = str(param_groups(Tied())).splitlines()
    assert lines[0].split() == ["parameter", "shape", "update", "reason"]
    assert "tokens.weight  20x8" in lines[1]


@pytest.mark.parametrize(
    "model, overrides, message",
    [
        (nn.Linear(2, 2), {"weight": "lion"}, "`overrides`.*spectral, sign, adamw, sgd; got 'lion'"),
        (nn.Linear(2, 2), {"wieght": "adamw"}, "'wieght', which matches no parameter"),
        (nn.Linear(2, 2), {"bias": "spectral"}, "bias must be a matrix"),
        (nn.ReLU(), None, "`model`.*at least one trainable parameter"),
    ],
)
def test_bad_requests_are_refused_by_name(model, overrides, message):
    with pytest.raises(ValueError, match=message):
        param_groups(model, overrides)


@pytest.mark.parametrize(
    "scale, rows, cols, factor",
    [
        ("none", 512, 128, 1.0),
        ("original", 512, 128, 2.0),
        ("original", 128, 512, 1.0),
        ("match_rms_adamw", 400, 100, 4.0),
        ("spectral", 100, 400, 0.5),
    ],
)
def test_shape_factors_are_the_published_ones(scale, rows, cols, factor):
    assert shape_factor(scale, rows, cols) == pytest.approx(factor)


def test_match_rms_adamw_gives_a_full_rank_step_a_root_mean_square_of_a_fifth():
    from specgrad.linalg import polar_factor

    step = shape_factor("match_rms_adamw", 60, 24) * polar_factor(torch.randn(60, 24), mode="strict")
    assert step.square().mean().sqrt().item() == pytest.approx(0.2, rel=1e-3)
