"""Known answers: counts, masks, losses and errors of deterministic cases; their recipes are in the files."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from specgrad import memory
from specgrad.linalg import h_lambda_derivative

FOLDER = Path(__file__).parents[1] / "reference"
ONE_STEP = json.loads((FOLDER / "capacity.json").read_text())
MULTISTEP = json.loads((FOLDER / "multistep.json").read_text())
UPDATES = {
    "gd": {"update": "gd"},
    "muon": {"update": "muon"},
    "hlam": {"update": "h_lambda"},
    "newton": {"update": "newton"},
    "ns5": {"update": "muon", "method": "quintic"},
}
METHODS = {
    "mean_field_gauss": {"method": "mean-field", "moments_from": "gauss"},
    "mean_field_emp": {"method": "mean-field"},
    "hybrid_4d": {"method": "hybrid"},
}


def splitmix_normals(stream, rows, dim):
    with np.errstate(over="ignore"):
        z = np.arange(1, rows * dim + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z += np.uint64(stream) * np.uint64(0xD1342543DE82EF95)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    uniform = ((z >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    radius, angle = np.sqrt(-2 * np.log(uniform[::2])), 2 * np.pi * uniform[1::2]
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).reshape(rows, dim) / np.sqrt(dim)


def task_of(case):
    if case.get("embeddings", "rng") == "rng":
        return memory.Task(case["N"], case["d"], case["alpha"], case["seed"])
    u, v = (splitmix_normals(2 * case["seed"] + k, case["N"], case["d"]) for k in (0, 1))
    p = memory.Task(case["N"], 1, case["alpha"]).frequencies
    return memory.Task.from_arrays(u, v, p, alpha=case["alpha"])


def sha(mask):
    return hashlib.sha256(np.packbits(mask.numpy()).tobytes()).hexdigest()[:16]


def assert_metrics(task, weight, expected):
    mask = memory.recovered(task, weight)
    got = memory.capacity_of(mask, task.frequencies)
    assert [got[name] for name in ("count", "prefix", "top90")] == [expected[k] for k in ("count", "prefix", "top90")]
    assert got["accuracy"] == pytest.approx(expected["acc"], rel=1e-12)
    assert sha(mask) == expected["mask_sha"]


@pytest.mark.parametrize("case", ONE_STEP["cases"], ids=lambda c: f"{c['embeddings']}-{c['d']}-{c['alpha']}-{c['B']}")
def test_one_step_of_every_update_recovers_exactly_the_known_items(case):
    task = task_of(case)
    q = task.frequencies if case["B"] is None else task.sample(case["B"])
    assert float(task.unembeddings.sum()) == pytest.approx(case["check"]["sum_U"], rel=1e-9)
    assert float(task.embeddings.sum()) == pytest.approx(case["check"]["sum_V"], rel=1e-9)
    assert int(torch.count_nonzero(q)) == case["distinct"]
    assert float(memory.gradient(task, None, q).norm()) == pytest.approx(case["check"]["G_fro"], rel=1e-12)
    for name, settings in UPDATES.items():
        lam = {"lam": case["lam"]} if name == "hlam" else {}
        weight = memory.one_step(task, frequencies=q, **settings, **lam)
        assert float(weight.norm()) == pytest.approx(case["results"][name]["W_fro"], rel=1e-9)
        assert_metrics(task, weight, case["results"][name])


@pytest.mark.parametrize("case", ONE_STEP["phi_prime"], ids=lambda c: str(c["i_zero_based"]))
def test_the_slope_of_the_signal_is_the_known_one(case):
    task = memory.Task(case["N"], case["d"], case["alpha"], case["seed"])
    item = case["i_zero_based"]
    q = task.frequencies.clone()
    q[item] = 0
    rest = memory.uncentred_gradient(task, q)
    slope = h_lambda_derivative(rest, task.unembeddings[item], task.embeddings[item], case["lam"])
    assert slope.item() == pytest.approx(case["phi_prime_0"], rel=1e-10)


@pytest.mark.parametrize("case", ONE_STEP["multistep"], ids=lambda c: str(c["N"]))
def test_several_exact_steps_have_the_known_losses_and_masks(case):
    task = task_of(case)
    rate = case["d"] ** 0.5
    run = memory.simulate(task, "muon", len(case["steps"]), rate, batch_size=case["B"], with_loss=True)
    for record, weight, expected in zip(run.records, run.weights, case["steps"], strict=True):
        assert record["batch_loss"] == pytest.approx(expected["batch_loss_before"], rel=1e-10)
        assert record["loss"] == pytest.approx(expected["population_loss_after"], rel=1e-10)
        assert record["gradient_norm"] == pytest.approx(expected["G_fro"], rel=1e-10)
        assert_metrics(task, weight, expected)


@pytest.mark.filterwarnings("ignore::specgrad.memory.MeanFieldWarning")
@pytest.mark.parametrize("case", MULTISTEP["cases"], ids=lambda c: str(c["alpha"]))
def test_exact_mean_field_and_hybrid_runs_have_the_known_masks_and_errors(case):
    task = task_of(case)
    rates = [c * case["d"] ** 0.5 for c in case["c"]]
    runs = {
        name: memory.simulate(task, "muon", 4, rates, gradient=method)
        for name, method in (("exact", "exact"), ("mean_field_emp", "mean-field"), ("hybrid_4d", "hybrid"))
    }
    for name, run in runs.items():
        for weight, expected in zip(run.weights, case["free_run"][name], strict=True):
            assert_metrics(task, weight, expected)
    for weight, expected in zip(runs["exact"].weights, case["local"][1:], strict=False):
        exact = memory.gradient(task, weight)
        for name, settings in METHODS.items():
            estimate = memory.estimate_gradient(task, weight, **settings)
            error = float((estimate.gradient - exact).norm() / exact.norm())
            assert error == pytest.approx(expected[name]["rel_error"], rel=1e-6)
            if "estimated_rel_error" in expected[name]:
                assert estimate.relative_error == pytest.approx(expected[name]["estimated_rel_error"], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [1.25, 1.5, 2.0])
def test_one_step_counts_lie_on_the_known_curves(alpha):
    curve = ONE_STEP["curves"]["one_step_population"]["mean"][f"{alpha:g}" if alpha != 2 else "2.0"]
    for dim in (64, 128, 256):
        counts = {update: [] for update in ("gd", "muon", "newton")}
        for k in range(3):
            seed = 1000 * k + dim
            u, v = (np.random.default_rng([seed, s]).standard_normal((100_000, dim)) / dim**0.5 for s in (0, 1))
            p = memory.Task(100_000, 1, alpha).frequencies
            task = memory.Task.from_arrays(u.astype(np.float32), v.astype(np.float32), p)
            for update, values in counts.items():
                values.append(memory.capacity(task, memory.one_step(task, update))["count"])
        for update, values in counts.items():
            # The same embeddings, rounded to float32: counts may differ by an item or two.
            assert np.mean(values) == pytest.approx(curve[update]["count"][str(dim)], abs=1, rel=0.01)
