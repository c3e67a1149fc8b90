"""Rebuilds the matrices of tests/reference/rank.json from their recipes."""

import json
from pathlib import Path

import numpy as np

RANK = json.loads((Path(__file__).parent / "reference" / "rank.json").read_text())


def silu(x):
    return x / (1 + np.exp(-x))


def build(recipe):
    kind = recipe["kind"]
    rng = np.random.default_rng(recipe.get("seed"))
    shape = (recipe.get("rows"), recipe.get("cols"))
    if kind == "gauss":
        return rng.standard_normal(shape)
    if kind == "gauss_shift":
        return rng.standard_normal(shape) + recipe["shift"]
    if kind in ("relu_features", "relu2_features", "swiglu_features"):
        d, cols, rows = recipe["d"], recipe["cols"], recipe["rows"]
        x = rng.standard_normal((d, cols))
        v = rng.standard_normal((rows, d)) / np.sqrt(d)
        if kind == "swiglu_features":
            return silu(v @ x) * (rng.standard_normal((rows, d)) / np.sqrt(d) @ x)
        return np.maximum(v @ x, 0) ** (2 if kind == "relu2_features" else 1)
    if kind == "low_rank_plus_noise":
        rows, cols, rank = recipe["rows"], recipe["cols"], recipe["rank"]
        product = rng.standard_normal((rows, rank)) @ rng.standard_normal((rank, cols))
        return product + recipe["noise"] * rng.standard_normal((rows, cols))
    if kind == "diag_power":
        matrix = np.zeros(shape)
        k = min(shape)
        matrix[np.arange(k), np.arange(k)] = np.arange(1, k + 1.0) ** -recipe["p"]
        return matrix
    if kind == "ones":
        return np.ones(shape)
    if kind == "eye":
        return np.eye(*shape)
    assert kind == "explicit", kind
    return np.array(recipe.get("entries", recipe.get("values")), dtype=float)


def least_squares(case):
    """Inputs A (features x tokens) and gradient G of a reference case, after its steps of gradient descent."""
    rng = np.random.default_rng(case["seed"])
    x = rng.standard_normal((case["d"], case["n"]))
    v = rng.standard_normal((case["k"], case["d"])) / np.sqrt(case["d"])
    act = case["act"]
    if act == "swiglu":
        a = silu(v @ x) * (rng.standard_normal((case["k"], case["d"])) / np.sqrt(case["d"]) @ x)
    else:
        a = {"relu": np.maximum(v @ x, 0), "relu2": np.maximum(v @ x, 0) ** 2, "tanh": np.tanh(v @ x)}.get(act, v @ x)
    truth = rng.standard_normal((case["m"], case["k"])) / np.sqrt(case["k"])
    weight = np.zeros_like(truth)
    step = case["n"] / np.linalg.norm(a, 2) ** 2
    for _ in range(case["gd_steps"]):
        weight -= step * (weight - truth) @ a @ a.T / case["n"]
    return a, (weight - truth) @ a @ a.T / case["n"]
