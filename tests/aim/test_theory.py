import numpy as np
import pytest
import torch

from specgrad.aim import Task, solve
from specgrad.aim.basis import initial_operators, moments_of_matrices, moments_of_operators
from specgrad.aim.closure import block_size
from specgrad.aim.direct import solve_closed
from specgrad.aim.ensembles import gaussian_factor, spectral_nodes, wishart_nodes
from specgrad.aim.hierarchy import initial_moments, make_hierarchy
from specgrad.aim.words import insertion_operator, wishart_word, word_space
from specgrad.runs import stream
from tests.aim.reference import AIM, EXACT, W1, W2, activation, task_of

TIED = AIM["tied_trajectories"]
COLUMNS = ("t1", "q11", "q12")


def described(case):
    return f"{case['init'][:5]}-{case['act']}-{case['M']}"


def check_close(out, case, rtol):
    for name in COLUMNS:
        np.testing.assert_allclose(out[name], case[name], rtol=rtol)


@pytest.mark.parametrize("kind", ["tied_K2", "tied_K3", "tied_K2_all_words"])
def test_classes_of_words_are_counted_right(kind):
    letters, merge = (3 if "K3" in kind else 2), "all" not in kind
    for order, count in AIM["word_class_counts"][kind].items():
        if int(order) <= 12:
            assert len(word_space(letters, int(order), merge=merge).codes) == count


@pytest.mark.parametrize("order", [4, 8, 12, 16])
def test_operators_have_the_known_number_of_entries(order):
    space, known = word_space(2, order), AIM["operator_nnz_tied_K2"][str(order)]
    assert insertion_operator(space, 0, 0).nnz == known["A_11"]
    assert insertion_operator(space, 0, 1).nnz == known["A_12"]


def test_free_wishart_moments_by_recursion_and_through_the_operators():
    task = Task(student_scale=1.0, teacher_scale=1.0)
    known = AIM["free_wishart_moments"]["values"]
    words = [tuple(int(c) - 1 for c in word) for word in known]
    operators = initial_operators(task, 4)
    np.testing.assert_allclose(moments_of_operators(operators, words), list(known.values()), rtol=1e-12)
    for word, value in zip(words, known.values(), strict=True):
        assert float(wishart_word(word, (1.0, 1.0), (1.0, 1.0))) == pytest.approx(value, rel=1e-12)


def test_moments_of_given_matrices_through_half_words_and_through_the_operators():
    known = AIM["small_matrices"]["moment_values"]
    words = [tuple(int(c) - 1 for c in word) for word in known]
    task = Task(dim=6, student_matrix=W1, teacher_matrix=W2 @ W2.T)
    np.testing.assert_allclose(moments_of_matrices(task.matrices(), words), list(known.values()), rtol=1e-12)
    np.testing.assert_allclose(moments_of_operators(initial_operators(task, 4, 0), words), list(known.values()), rtol=1e-10)


@pytest.mark.parametrize("ratio", [0.3, 1.0, 2.0])
def test_spectral_laws_have_the_moments_of_drawn_matrices(ratio):
    w = gaussian_factor(800, ratio, 0.7, stream(0, "w"))
    eigenvalues = (w @ w.mT).trace() / 800, ((w @ w.mT) ** 2).sum() / 800
    nodes, weights = wishart_nodes(ratio, 0.7, 16)
    for power, value in enumerate(eigenvalues, start=1):
        assert float(weights @ nodes**power) == pytest.approx(float(value), rel=0.02)
    x, w16 = spectral_nodes("symmetric", ratio, 0.7, 16)
    assert float(w16 @ x**4) == pytest.approx(2 * 0.7**2)


@pytest.mark.parametrize("case", [c for c in TIED if isinstance(c["M"], int)], ids=described)
def test_hierarchy_equals_the_reference(case):
    task, seed = task_of(case)
    out = solve(task, "hierarchy", t_eval=case["t"], order=case["M"], seed=seed, untrusted="keep", rtol=1e-11)
    check_close(out, case, case["rtol"])


@pytest.mark.parametrize("case", [c for c in TIED if c["M"] in ("matrix_flow", "riccati_closed_form")], ids=described)
def test_matrix_flow_and_its_closed_form_equal_the_reference(case):
    task, seed = task_of(case)
    check_close(solve(task, "flow", t_eval=case["t"], seed=seed, rtol=1e-11), case, case["rtol"])


@pytest.mark.parametrize("case", [c for c in TIED if c["M"] == "operator_closure_m5"], ids=described)
def test_closure_equals_the_reference(case):
    task, _ = task_of(case)
    check_close(solve(task, "closure", t_eval=case["t"], order=5, rtol=1e-10), case, case["rtol"])


@pytest.mark.parametrize("case", EXACT["cases"], ids=lambda c: c["activation"])
def test_exact_solution_equals_the_reference(case):
    task = Task(
        student_ratio=case["kappa_student"], teacher_ratio=case["kappa_teacher"], student_scale=case["sigma2_student"],
        teacher_scale=case["sigma2_teacher"], weight_decay=case["gamma"], **activation(case["activation"]),
    )  # fmt: skip
    out = solve(task, "exact", t_eval=case["t"])
    for name in COLUMNS:
        np.testing.assert_allclose(out[name], case[name], atol=1e-5)


@pytest.mark.parametrize("weight_decay", [0.0, 1.0])
@pytest.mark.parametrize("name", ["h1", "h2", "tanh"])
def test_exact_solution_is_the_limit_of_the_matrix_flow(name, weight_decay):
    task = Task(dim=80, student_ratio=0.5, activation=name, weight_decay=weight_decay)
    times = [0.1, 0.5, 1.5]
    limit = solve(task, "exact", t_eval=times)
    draws = [solve(task, "flow", t_eval=times, seed=seed, rtol=1e-5) for seed in range(3)]
    for column in COLUMNS:
        mean = np.mean([draw[column] for draw in draws], axis=0)
        # Traces fluctuate and are shifted by O(1/d).
        np.testing.assert_allclose(mean, limit[column], atol=3 / 80)


def test_exact_solution_with_a_given_teacher_has_its_spectrum():
    teacher = np.diag(np.repeat([0.2, 1.0], 30))
    task = Task(dim=60, teacher_matrix=teacher, activation="h1")
    out = solve(task, "exact", t_eval=[0.0, 8.0])
    assert out["q22"][0] == pytest.approx(0.52)
    assert out["q12"][1] == pytest.approx(0.52, rel=1e-2)


def test_a_student_of_lower_rank_ends_at_the_smallest_risk_without_overflow():
    from specgrad.aim import minimum_risk

    for name in ("h1", "h2"):
        task = Task(student_ratio=0.4, activation=name)
        out = solve(task, "exact", t_eval=[100.0])
        assert out["loss"][0] == pytest.approx(minimum_risk(task).value, rel=1e-2)


def test_the_loss_only_falls_and_matches_the_lyapunov_identity():
    task = Task(activation="h2", weight_decay=0.5, dim=40)
    times = np.linspace(0, 1.5, 200)
    exact = solve(task, "exact", t_eval=times)
    free_energy = exact["loss"] + 0.25 * exact["t1"]
    assert (np.diff(free_energy) < 0).all()
    # dF/dt = -(4/d) |H W|^2 at time 0 on a draw.
    flow = solve(task, "flow", t_eval=[0.0, 1e-5], seed=0)
    weights, matrices = task.weights(0), task.matrices(0)
    gamma = task.potential.gamma([[flow["q11"][0], flow["q12"][0]], [flow["q12"][0], flow["q22"][0]]])
    h_w = (gamma[0, 0] * matrices[0] + gamma[0, 1] * matrices[1]) @ weights[0] + 0.125 * weights[0]
    change = (flow["loss"] + 0.25 * flow["t1"]) @ [-1, 1] / 1e-5
    assert change == pytest.approx(-4 / 40 * float((h_w**2).sum()), rel=1e-3)


@pytest.mark.parametrize("name", ["h1", "h2", "h3", "softmax"])
def test_the_closure_of_degree_four_stays_within_two_percent_of_the_matrix_flow(name):
    scale = 1.0 if name in ("h1", "softmax") else 0.5
    task = Task(dim=100, student_scale=scale, teacher_scale=scale, **activation(name))
    times = np.linspace(0.0, 10.0 if name == "softmax" else 1.5, 25)
    flow, closure = (solve(task, method, t_eval=times, seed=0, rtol=1e-6) for method in ("flow", "closure"))
    for column in COLUMNS:
        assert np.abs(closure[column] / flow[column] - 1).max() < 0.02


def test_the_closure_takes_several_students_and_teachers():
    task = Task(dim=40, student_ratio=(0.5, 0.5), teacher_ratio=(0.5, 0.5), activation="h2")
    times = [0.1, 0.4]
    flow, closure = (solve(task, method, t_eval=times, seed=0, order=3, rtol=1e-5) for method in ("flow", "closure"))
    for column in ("t2", "q11", "q12", "q13", "q24"):
        np.testing.assert_allclose(closure[column], flow[column], rtol=0.03)


def test_the_right_hand_side_of_the_hierarchy_is_the_derivative_of_the_moments_of_the_flow():
    task = Task(dim=12, activation="h3", weight_decay=0.7)
    hierarchy = make_hierarchy(task, 8)
    start = initial_moments(task, hierarchy.space, seed=0)
    drift = hierarchy.rhs(0.0, start)
    h, gamma = 1e-6, task.potential.gamma(hierarchy.q(start))
    w, matrices = task.weights(0)[0], task.matrices(0)
    step = (gamma[0, 0] * matrices[0] + gamma[0, 1] * matrices[1]) @ w + 0.7 / 4 * w
    ends = []
    for sign in (1, -1):
        moved = w - sign * h * step
        ends.append(moments_of_matrices([moved @ moved.mT, matrices[1]], hierarchy.space.words))
    numeric = (ends[0] - ends[1]) / (2 * h)
    short = hierarchy.space.lengths <= 7
    np.testing.assert_allclose(drift[short], numeric[short], rtol=1e-5, atol=1e-7)


def test_merging_words_changes_nothing_but_the_cost():
    task = Task(activation="h2", weight_decay=0.3)
    merged, full = make_hierarchy(task, 8), make_hierarchy(task, 8, merge=False)
    a, b = (initial_moments(task, h.space) for h in (merged, full))
    da, db = merged.rhs(0.0, a), full.rhs(0.0, b)
    for number, word in enumerate(merged.space.words):
        assert db[full.space.place(word)] == pytest.approx(da[number], rel=1e-12, abs=1e-12)


def test_the_hierarchy_says_how_long_it_can_be_trusted():
    task = Task(activation="h1", student_scale=1.0, teacher_scale=1.0)
    times = np.linspace(0, 0.12, 61)
    out = solve(task, "hierarchy", t_eval=times, order=12, untrusted="nan")
    # Known: 1 % error of order 12 at t = 0.049, divergence of every order beyond 0.072.
    assert 0.035 < out["trusted_until"] < 0.06
    assert out["radius"] == pytest.approx(1 / 16)
    exact = solve(task, "exact", t_eval=times)
    kept = np.isfinite(out["q11"])
    assert kept.sum() == (times <= out["trusted_until"]).sum()
    for column in COLUMNS:
        np.testing.assert_allclose(out[column][kept], exact[column][kept], rtol=0.015)
    with pytest.raises(ValueError, match=r"must end at t = 0.062 here: .* orders 12 and below of the hierarchy"):
        solve(task, "hierarchy", t_eval=times, order=12)
    with pytest.warns(UserWarning, match="differ by more than tol 0.01"):
        late = solve(task, "hierarchy", t_eval=[0.0, 0.06], order=12)
    assert np.isfinite(late["q11"]).all()
    with pytest.raises(ValueError, match=r"must end at t = 0\.0[34]"):
        solve(task, "hierarchy", t_eval=times[:31], order=12, untrusted="raise")


@pytest.mark.parametrize("case", AIM["direct_trajectories"], ids=lambda c: c["act"])
def test_the_closed_system_of_direct_attention_equals_the_reference(case):
    task = Task(attention="direct", activation=case["act"], weight_decay=case["gamma"])
    start = tuple(np.array(case[name]) for name in ("t0", "Psi0", "Omega0"))
    t, psi, omega = solve_closed(task, np.array(case["tau"]), start=start, rtol=1e-11)
    known = {
        "t1": t[:, 0],
        "Omega11": omega[:, 0, 0],
        "Omega12": omega[:, 0, 1],
        "Psi11": psi[:, 0, 0],
        "Psi12": psi[:, 0, 1],
    }
    for name, got in known.items():
        np.testing.assert_allclose(got, case[name], rtol=case["rtol"])


@pytest.mark.parametrize("name", ["h2", "h3"])
def test_the_uninformative_manifold_of_direct_attention_is_invariant(name):
    out = solve(Task(attention="direct", student="symmetric", activation=name), t_eval=[1.0, 10.0])
    assert np.abs(out["pOmega12"]).max() < 1e-10
    learns = solve(Task(attention="direct", student="symmetric", activation="h1"), t_eval=[10.0])
    assert learns["pOmega12"][0] == pytest.approx(learns["pOmega22"][0], rel=1e-6)


def test_a_positive_start_of_direct_attention_escapes():
    for name in ("h2", "h3"):
        out = solve(Task(attention="direct", student="wishart", activation=name), t_eval=[0.05])
        assert out["pOmega12"][0] > 1e-3


def test_auto_says_what_it_took_and_why():
    times = [0.05]
    assert solve(Task(), t_eval=times)["method"] == "exact"
    assert solve(Task(attention="direct"), t_eval=times)["method"] == "closed"
    assert solve(Task(dim=20, activation="h1"), t_eval=times, seed=0)["method"] == "flow"
    several = solve(Task(student_ratio=(1.0, 0.5), activation="h1"), t_eval=times, tol=1e-3)
    assert several["method"] == "closure"
    assert f"orders {several['order'] - 1} and {several['order']} agree" in several["why"]


def test_auto_meets_its_tolerance_on_one_draw():
    task, times = Task(dim=40, activation="h2"), [0.1, 0.3, 1.0]
    truth = solve(task, "flow", t_eval=times, seed=1)
    for tol in (0.05, 0.01):
        out = solve(task, t_eval=times, seed=1, tol=tol)
        assert np.abs(out["q12"] / truth["q12"] - 1).max() < tol


def test_auto_warns_where_no_method_meets_the_tolerance():
    with pytest.warns(UserWarning, match="more than tol"):
        solve(Task(student_ratio=(1.0, 1.0), teacher_ratio=(1.0, 1.0)), t_eval=[0.2], tol=1e-9, rtol=1e-6)


def test_auto_stops_raising_the_order_of_two_matrices_and_takes_the_flow():
    out = solve(Task(dim=30, activation="h2"), t_eval=[0.5], seed=0, tol=1e-6, rtol=1e-7)
    assert out["method"] == "flow"
    assert "orders 6 and 7 still differ" in out["why"]


@pytest.mark.parametrize("order", [1, 2, 3])
def test_blocks_of_the_closure_have_the_size_that_is_foreseen(order):
    for students in (1, 2, 3):
        operators = initial_operators(Task(student_ratio=(1.0,) * students), order)
        assert operators.shape[1] == block_size(students + 1, order)


@pytest.mark.parametrize(
    ("task", "settings", "message"),
    [
        ({}, {"method": "closed", "t_max": 1.0}, "needs attention='direct'"),
        ({"attention": "direct"}, {"method": "exact", "t_max": 1.0}, "'exact' of `aim.solve` needs tied attention"),
        ({"attention": "direct"}, {"method": "hierarchy", "t_max": 1.0}, "needs tied attention"),
        ({"student_ratio": (1.0, 1.0)}, {"method": "exact", "t_max": 1.0}, "one trained Gaussian student"),
        ({}, {"method": "flow", "t_max": 1.0}, "`dim` of `aim.Task` must be given"),
        ({}, {"method": "runge", "t_max": 1.0}, "`method` of `aim.solve` must be one of auto"),
        ({}, {}, "`t_eval` or `t_max`"),
        ({}, {"t_eval": [1.0, 0.5]}, "ascending times"),
        ({}, {"t_max": 1.0, "seed": 0}, "needs a task with `dim`"),
        ({}, {"method": "hierarchy", "t_max": 0.01, "order": 40}, "`order` of `aim.solve` must be smaller"),
        ({}, {"method": "hierarchy", "t_max": 0.01, "order": 1}, "must be >= 2"),
        ({}, {"method": "closure", "t_max": 0.01, "order": 40}, "blocks have at most 4096 rows"),
        ({}, {"method": "closure", "t_max": 0.01, "rtol": 0.0}, "`rtol` of `aim.solve` must lie between 0 and 1"),
        ({}, {"t_eval": []}, "ascending times"),
        ({"activation": torch.relu}, {"t_max": 0.1}, "twice differentiable"),
        ({"activation": torch.relu}, {"method": "closure", "t_max": 0.1}, "twice differentiable"),
        ({"activation": torch.relu, "attention": "direct"}, {"t_max": 0.1}, "twice differentiable"),
        (
            {"activation": "h1", "weight_decay": 2000.0},
            {"method": "exact", "t_eval": [5.0], "rtol": 1e-3},
            "must end before t = ",
        ),
    ],
)
def test_what_a_method_cannot_do_is_refused(task, settings, message):
    with pytest.raises(ValueError, match=message):
        solve(Task(**task), **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dim": 20, "student_ratio": 0.01}, "`student_ratio` of `aim.Task` must give a rank >= 1"),
        ({"student_ratio": 0.0}, "`student_ratio` of `aim.Task` must be > 0"),
        ({"teacher_scale": -1.0}, "`teacher_scale` of `aim.Task` must be > 0"),
        ({"attention": "untied"}, "`attention` of `aim.Task` must be one of tied, direct"),
        ({"weight_decay": -0.1}, "`weight_decay` of `aim.Task` must be >= 0"),
        ({"student": "wishart"}, "`student` of `aim.Task` is for attention='direct'"),
        ({"attention": "direct", "student": "zero"}, "`student` of `aim.Task` must be one of"),
        ({"dim": 6, "student_matrix": np.eye(5)}, r"`student_matrix` of `aim.Task` must have shape \(6, rank\)"),
        ({"dim": 6, "teacher_matrix": np.triu(np.ones((6, 6)))}, "must be symmetric"),
        ({"student_matrix": np.eye(5)}, "needs `dim`"),
        ({"trainable": (2,)}, "`trainable` of `aim.Task` must be a tuple of indices < 2, not empty"),
        ({"trainable": ()}, "`trainable` of `aim.Task` must be a tuple of indices < 2, not empty"),
        ({"teacher": "gaussian"}, "`teacher` of a tied `aim.Task` must be symmetric"),
        ({"student_ratio": ()}, "`student_ratio` of `aim.Task` must be > 0, or a tuple of such numbers"),
        ({"dim": 6, "student_matrix": np.full((6, 6), np.nan)}, "`student_matrix` of `aim.Task` must be finite"),
        ({"tokens": 2, "covariance": [[1.0, np.nan], [np.nan, 1.0]]}, "`covariance` of `aim.Potential` must be finite"),
        ({"tokens": 2, "covariance": [[1.0]]}, "`covariance`"),
    ],
)
def test_tasks_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Task(**settings)


def test_times_that_no_integration_reaches_end_in_an_error_and_not_in_waiting(monkeypatch):
    monkeypatch.setattr("specgrad.aim.ode._MOST_EVALUATIONS", 2000)
    with pytest.raises(ValueError, match=r"`t_eval` must end earlier than t = .* the integration has come to"):
        solve(Task(), "exact", t_eval=[1e6])
