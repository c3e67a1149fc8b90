"""Statistics of inputs against the reference cases, exact and estimated, streamed and at once."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from specgrad import Probe
from specgrad.linalg import stable_rank
from specgrad.probe import condition
from specgrad.probe.advice import critical_batch
from specgrad.probe.gradients import gain_ranks, matrix_ranks, shardwise_nuclear_rank, squared_singular_values
from specgrad.probe.inputs import InputStatistics, Rows, TokenCounts, frequency_exponent
from tests.reference_matrices import RANK, build


def streamed(matrix, parts, exact):
    chunks = torch.as_tensor(matrix).chunk(parts)
    statistics = InputStatistics()
    for i, chunk in enumerate(chunks):
        statistics.add(InputStatistics.of(Rows(chunk), i, exact=exact, basis=statistics.basis))
    return statistics.ranks()


@pytest.mark.parametrize("case", RANK["matrices"], ids=lambda case: f"{case['recipe']['kind']}-{case['check']['shape']}")
@pytest.mark.parametrize("parts", [1, 3])
def test_streamed_ranks_of_the_reference_matrices(case, parts):
    matrix = torch.from_numpy(build(case["recipe"]))
    exact, estimate = streamed(matrix, parts, True), streamed(matrix, parts, False)
    assert exact["stable_rank"] == pytest.approx(case["st"], rel=1e-9)
    assert exact["stable_rank_error"] == 0
    assert estimate["stable_rank_side"] == "above"
    assert (
        case["st"] * (1 - 1e-9) <= estimate["stable_rank"] <= case["st"] * (1 + 1e-9) / (1 - estimate["stable_rank_error"])
    )
    if parts == 1:
        assert estimate["stable_rank"] == pytest.approx(case["st"], rel=0.03)
    assert exact["noise_to_signal"] >= case["st"] * (1 - 1e-9)
    got = matrix_ranks(squared_singular_values(matrix))
    for name, key in (
        ("nuclear_rank", "nr"), ("participation_ratio", "pr"), ("gradient_stable_rank", "st"), ("gradient_norm", "fro"),
        ("nuclear_norm", "nuc"), ("spectral_norm", "op"),
    ):  # fmt: skip
        assert got[name] == pytest.approx(case[key], rel=1e-7), name
    assert got["gradient_stable_rank"] <= got["participation_ratio"] * (1 + 1e-12) <= got["nuclear_rank"] * (1 + 1e-11)


def test_a_zero_matrix_has_no_ranks():
    assert math.isnan(streamed(torch.zeros(4, 3), 1, True)["stable_rank"])
    assert math.isnan(streamed(torch.zeros(4, 3), 1, False)["stable_rank"])
    assert math.isnan(matrix_ranks(squared_singular_values(torch.zeros(4, 3)))["nuclear_rank"])


@pytest.mark.parametrize("case", RANK["token_indicator"], ids=str)
def test_token_counts_give_the_stable_rank_of_the_indicator_exactly(case):
    if "explicit" in case:
        ids = np.array(case["explicit"])
    else:
        p = np.arange(1, case["V"] + 1.0) ** -case["zipf"]
        ids = np.random.default_rng(case["seed"]).choice(case["V"], case["n"], p=p / p.sum())
        assert ids[:10].tolist() == case["first10"]
    counts = TokenCounts(torch.zeros(int(ids.max()) + 1, dtype=torch.int64))
    counts.add(torch.from_numpy(ids))
    assert counts.ranks()["stable_rank"] == pytest.approx(case["st"], rel=1e-12)
    indicator = torch.nn.functional.one_hot(torch.from_numpy(ids)).double()
    assert stable_rank(indicator).item() == pytest.approx(case["st"], rel=1e-9)


@pytest.mark.parametrize("exponent", [0.8, 1.0, 1.5])
def test_the_frequency_exponent_of_drawn_tokens_is_that_of_their_law(exponent):
    p = np.arange(1, 2001.0) ** -exponent
    ids = np.random.default_rng(0).choice(2000, 200_000, p=p / p.sum())
    assert frequency_exponent(torch.bincount(torch.from_numpy(ids))) == pytest.approx(exponent, abs=0.05)


@pytest.mark.parametrize("exponent, expected", [(k, v) for k, v in RANK["zipf_50257"].items() if k != "exponent_for_26"])
def test_the_stable_rank_of_a_zipf_vocabulary(exponent, expected):
    p = torch.arange(1, 50258, dtype=torch.float64) ** -float(exponent)
    assert (p.sum() / p.max()).item() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("case", RANK["diagonal_gain"], ids=lambda case: f"shift {case['shift']}")
def test_the_condition_of_a_gain_is_that_of_the_reference(case):
    rng = np.random.default_rng(case["seed"])
    a = rng.standard_normal((32, 300)) + case["shift"]
    a /= np.sqrt((a**2).mean(axis=0))
    g = torch.from_numpy(rng.standard_normal(32))
    ranks = gain_ranks(g)
    assert ranks["nuclear_rank"] == pytest.approx(case["l1sq_over_l2sq"], rel=1e-9)
    assert ranks["gradient_stable_rank"] == pytest.approx(case["st_diag"], rel=1e-9)
    st = streamed(torch.from_numpy(a.T.copy()), 1, True)["stable_rank"]
    assert st == pytest.approx(case["st_A"], rel=1e-9)
    assert (condition(ranks["nuclear_rank"], st).ratio >= 1) == case["condition"]


@pytest.mark.parametrize("case", RANK["shardwise"], ids=lambda case: f"{case['seed']}-{case['S']}-{case['axis']}")
def test_the_shardwise_nuclear_rank_is_that_of_the_reference(case):
    rng = np.random.default_rng(case["seed"])
    a = np.maximum(rng.standard_normal((24, 100)) + 0.3, 0)
    g = torch.from_numpy(-(rng.standard_normal((16, 24)) @ a) @ a.T / 100)
    axis = 0 if case["axis"].startswith("row") else 1
    assert shardwise_nuclear_rank(g, case["S"], axis) == pytest.approx(case["proxy"], rel=1e-9)
    assert case["nr"] / case["S"] <= case["proxy"] * (1 + 1e-12) <= case["nr"] * (1 + 1e-11)


@pytest.mark.parametrize("case", RANK["correction_term"], ids=str)
def test_the_plain_condition_implies_the_exact_one_of_a_block(case):
    threshold = (case["st"] + case["alpha"]) / (1 + case["alpha"] / case["stG"])
    assert threshold == pytest.approx(case["threshold"], rel=1e-12)
    # nr >= st(G) always; where nr >= st(A) holds as well, nr passes the exact threshold.
    nuclear = max(case["st"], case["stG"])
    assert nuclear >= threshold * (1 - 1e-12)


@pytest.mark.parametrize(
    "activation, key", [(torch.relu, "relu"), (lambda x: x.relu().square(), "relu2"), (torch.abs, "abs")]
)
def test_post_activation_noise_to_signal_is_the_gaussian_moment(activation, key):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4096, 256, generator=generator) @ torch.randn(256, 512, generator=generator) / 16
    got = streamed(activation(x), 1, False)
    # One row of 512 features over 4096 tokens: two per cent of fluctuation of the feature variances.
    assert got["noise_to_signal"] == pytest.approx(RANK["gaussian_moments"][key], rel=0.1)
    assert got["stable_rank"] <= got["noise_to_signal"]


def test_one_huge_token_is_found_and_the_stable_rank_without_it_given():
    x = torch.randn(2000, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    clean = streamed(x, 2, True)
    x[7] *= 60
    got = streamed(x, 2, True)
    assert got["stable_rank"] < 2 < 30 < clean["stable_rank"]
    assert got["outlier_share"] > 0.5
    assert got["stable_rank_rest"] == pytest.approx(stable_rank(torch.cat([x[:7], x[8:]])).item(), rel=1e-9)
    assert math.isnan(clean["stable_rank_rest"])


def test_a_warm_start_follows_inputs_that_change():
    model = nn.Linear(32, 4, bias=False)
    generator = torch.Generator().manual_seed(0)
    with Probe(model, every=1) as probe:
        for step in range(4):
            x = torch.randn(200, 32, generator=generator) + 3 * torch.eye(32)[step]
            model(x).square().mean().backward()
            (record,) = probe.step()
            assert record["stable_rank"] == pytest.approx(stable_rank(x).item(), rel=0.01)


def test_the_critical_batch_is_the_theorys_and_begins_above_exponent_one():
    assert critical_batch(1.0, 64) is None
    assert critical_batch(float("nan"), 64) is None
    found = critical_batch(2.0, 256)
    assert (found.sgd, found.muon) == (16, 256**2.5)
