import numpy as np
import pytest
from scipy.integrate import solve_ivp

from specgrad.aim import (
    Task,
    convergence,
    initial_slope,
    minimum_risk,
    polyak_constant,
    population_gap,
    recovery_time,
    samples_at,
    simulate,
    solve,
)
from specgrad.aim.direct import solve_closed
from specgrad.aim.recovery import direct_slope
from tests.aim.reference import AIM, activation

SLOPES = AIM["initial_derivatives"]


@pytest.mark.parametrize(
    ("name", "scale", "slope"), [("h1", 1.0, 4.0), ("h2", 0.5, 0.5), ("h3", 0.5, 0.375), ("soft", 1.0, 0.45145)]
)
def test_initial_slopes_of_tied_attention(name, scale, slope):
    task = Task(student_scale=scale, teacher_scale=scale, **activation(name))
    assert initial_slope(task)["dp12"] == pytest.approx(slope, abs=5e-6)
    start = solve(task, "exact", t_eval=[0.0, 1e-5])
    assert (start["p12"][1] - start["p12"][0]) / 1e-5 == pytest.approx(slope, rel=1e-3)


def test_initial_slopes_in_the_reference_file():
    for case in SLOPES:
        if case["case"].startswith("tied"):
            task = Task(activation=case["act"], student_scale=case["scale"], teacher_scale=case["scale"])
            assert initial_slope(task)["dp12"] == pytest.approx(case["dp12_dt"], rel=1e-12)
        else:
            cross = case["Omega12=Psi12"]
            psi, omega = ([[case[f"{n}11"], cross], [cross, case[f"{n}22"]]] for n in ("Psi", "Omega"))
            task = Task(attention="direct", activation=case["act"])
            found = direct_slope(task, np.array(case["t"]), np.array(psi), np.array(omega))
            assert found["dpOmega12"] == pytest.approx(case["dpOmega12_dtau"], abs=1e-12)
            assert found["dpPsi12"] == pytest.approx(case["dpPsi12_dtau"], abs=1e-12)


def test_recovery_times_of_theory_and_of_sgd_agree():
    task = Task(dim=60, activation="h1")
    theory = recovery_time(solve(task, t_max=1.0), 0.5)
    run = recovery_time(simulate(task, lr=0.01, batch_size=512, t_max=0.7, seeds=3), 0.5)
    assert theory.shape == ()
    assert run.shape == (3,)
    assert np.abs(run / theory - 1).max() < 0.08
    never = recovery_time(solve(Task(attention="direct", activation="h2", student="symmetric"), t_max=1.0))
    assert np.isnan(never)


def corrected_recovery_time(task, seed, times):
    """Recovery time of the noise-free flow of h2 with fourth cumulants, which make its population loss exact at finite d.

    ``f = (z_1^2 - z_2^2)^2 / 2`` adds ``kappa_1111/2 + kappa_2222/2 - kappa_1122`` to Phi: ``kappa_1111 = 48 tr(S^4)/d``,
    ``kappa_1122 = (32 tr(S_1^2 S_2^2) + 16 tr(S_1 S_2 S_1 S_2))/d``; dW/dt is -(d/2) times the gradient in S_1, times W.
    """
    d = task.dim
    w0, s2 = (m.numpy() for m in task.weights(seed))

    def overlaps(s1):
        return np.array([[np.sum(a * b) for a in (s1, s2)] for b in (s1, s2)]) / d

    def rhs(_, state):
        w = state.reshape(w0.shape)
        s1 = w @ w.T
        gamma = task.potential.gamma(overlaps(s1))
        extra = 48 * s1 @ s1 @ s1 - 16 * (s1 @ s2 @ s2 + s2 @ s2 @ s1 + s2 @ s1 @ s2)
        return -((gamma[0, 0] * s1 + gamma[0, 1] * s2 + extra / d) @ w).ravel()

    states = solve_ivp(rhs, (0, times[-1]), w0.ravel(), t_eval=times, rtol=1e-5).y.T
    found = {"t": times, "overlap": []}
    for state in states:
        w = state.reshape(w0.shape)
        q, traces = overlaps(w @ w.T), np.array([np.sum(w * w), np.trace(s2)]) / d
        found["overlap"].append((q[0, 1] - traces[0] * traces[1]) / (q[1, 1] - traces[1] ** 2))
    return float(recovery_time({name: np.array(values) for name, values in found.items()}))


def test_fourth_cumulants_account_for_the_earlier_recovery_of_h2_at_finite_dimension():
    task, times = Task(dim=40, activation="h2"), np.linspace(0, 0.3, 31)
    limit = float(recovery_time(solve(task, t_eval=times)))
    run = recovery_time(simulate(task, lr=0.003, batch_size=512, t_eval=times, seeds=2))
    for seed in (0, 1):
        assert run[seed] < 0.8 * limit
        assert run[seed] == pytest.approx(corrected_recovery_time(task, seed, times), rel=0.05)


def test_samples_are_counted_in_units_of_d_squared_log_d():
    task = Task(dim=100)
    # t = 4 lr n / d: with lr = 1/(d log d) one unit of time is d^2 log d / 4 steps of one sample.
    assert samples_at(task, 1.0, 1 / (100 * np.log(100))) == pytest.approx(0.25)


def test_strong_recovery_is_exponential_with_the_known_constant_where_the_spectrum_has_a_gap():
    times = np.geomspace(0.1, 30, 60)
    gap = convergence(solve(Task(activation="h1", student_ratio=2.0, teacher_ratio=2.0), t_eval=times))
    assert gap.kind == "exponential"
    # c = 4 lambda_min, lambda_min = scale (sqrt(2) - 1)^2, approached from above like 1/t: few eigenvalues lie at the edge.
    bound = 2 * (2**0.5 - 1) ** 2
    assert bound < gap.rate[-1] < bound + 1.5 / gap.t[-1]
    assert gap.t[-1] > 20
    square = convergence(solve(Task(activation="h1"), t_eval=times))
    assert square.kind == "power law"


@pytest.mark.parametrize("name", ["h1", "h2", "h3", "tanh", "soft"])
def test_the_end_of_tied_recovery_has_the_rate_of_the_linearised_flow(name):
    task = Task(student_ratio=3.0, teacher_ratio=3.0, **activation(name))
    c = polyak_constant(task)
    found = convergence(solve(task, t_eval=np.linspace(2, 7, 60) / c, rtol=1e-11))
    assert found.kind == "exponential"
    # A continuum of rates reaches down to c for Hermite activations, so that c is approached like 1/t.
    slack = 0.01 if name in ("tanh", "soft") else 1 / (found.t[-1] * c)
    assert 1 - 1e-3 < found.rate[-1] / c < 1 + slack


@pytest.mark.parametrize(
    "settings",
    [
        {"activation": "h1", "teacher": "symmetric"},
        {"activation": "h2", "student": "wishart"},
        {"activation": "tanh"},
        {"activation": "tanh", "tokens": 2, "covariance": [[1.0, 0.4], [0.4, 1.5]]},
        {"activation": "softmax", "tokens": 2},
    ],
    ids=str,
)
def test_the_end_of_direct_recovery_has_the_rate_of_the_linearised_flow(settings):
    task = Task(attention="direct", **settings)
    c = polyak_constant(task)
    found = convergence(solve(task, t_eval=np.linspace(2, 7, 60) / c, rtol=1e-11))
    assert found.rate[-1] == pytest.approx(c, rel=2e-3)


@pytest.mark.parametrize(("teacher_ratio", "power"), [(1.0, 2.5), (0.5, 2.0)])
@pytest.mark.parametrize("name", ["h1", "h2"])
def test_without_a_gap_the_loss_falls_with_the_known_power(name, teacher_ratio, power):
    task = Task(activation=name, teacher_ratio=teacher_ratio)
    assert polyak_constant(task) == 0.0
    found = convergence(solve(task, t_eval=np.geomspace(1.0, 300.0, 60)))
    assert found.kind == "power law"
    assert found.exponent[-10:].mean() == pytest.approx(power, rel=0.04)


@pytest.mark.parametrize(
    "settings",
    [
        {"weight_decay": 1.0},
        {"student_ratio": (1.0, 1.0)},
        {"teacher": "symmetric"},
        {"attention": "direct", "teacher": "gaussian"},
    ],
    ids=str,
)
def test_no_constant_is_given_where_the_teacher_is_not_the_minimum(settings):
    with pytest.raises(ValueError, match=r"`aim.polyak_constant` needs one student and one frozen teacher"):
        polyak_constant(Task(**settings))


def test_no_constant_is_given_for_a_loss_with_its_minimum_elsewhere():
    def loss(scores):
        z = scores[..., 0, 0, :]
        return (z[..., 0] - 2 * z[..., 1]) ** 2

    with pytest.raises(ValueError, match="must have its minimum where student and teacher agree"):
        polyak_constant(Task(loss=loss, student_ratio=2.0, teacher_ratio=2.0))


@pytest.mark.parametrize("name", ["h1", "h2", "h3", "tanh"])
@pytest.mark.parametrize("student_trace", [0.0, 0.3])
def test_initial_slopes_of_direct_attention_are_those_of_the_closed_system(name, student_trace):
    task = Task(attention="direct", activation=name)
    t = np.array([student_trace, 0.5])
    cross = t[0] * t[1]
    psi, omega = np.array([[0.3, cross], [cross, 0.5]]), np.array([[0.6, cross], [cross, 0.55]])
    times = np.array([0.0, 1e-6])
    traces, found_psi, found_omega = solve_closed(task, times, start=(t, psi, omega), rtol=1e-12)
    slopes = direct_slope(task, t, psi, omega)
    for key, found in (("dpOmega12", found_omega), ("dpPsi12", found_psi)):
        centred = found[:, 0, 1] - traces[:, 0] * traces[:, 1]
        assert (centred[1] - centred[0]) / 1e-6 == pytest.approx(slopes[key], abs=2e-4)
    if student_trace == 0 and name == "h2":
        assert slopes["dpOmega12"] == 0


def test_convergence_takes_theory_of_one_student_and_samples_need_a_rate():
    run = simulate(Task(dim=10, activation="h1"), lr=0.01, t_max=0.1, seeds=2)
    with pytest.raises(ValueError, match=r"`columns` of `aim.convergence` must be of `aim.solve`"):
        convergence(run)
    with pytest.raises(ValueError, match=r"`lr` of `aim.samples_at` must be > 0"):
        samples_at(Task(dim=10), 1.0, 0.0)


def test_convergence_refuses_an_optimum_above_the_losses():
    with pytest.raises(ValueError, match=r"`optimum` of `aim.convergence`"):
        convergence(solve(Task(activation="h1"), t_max=2.0), optimum=10.0)


@pytest.mark.parametrize("dim", [50, 100])
def test_the_gap_of_an_even_loss_is_of_order_one_over_d_and_given_by_fourth_cumulants(dim):
    task = Task(dim=dim, activation="tanh", student_scale=1.0, teacher_scale=1.0)
    gap = population_gap(task.potential, task.matrices(0), samples=100_000)
    assert abs(gap.third) < 1e-10
    assert -1.3 < gap.fourth * dim < -0.9
    assert abs(gap.gap - gap.fourth) < 4 * gap.error + 2 / dim**2 * 5


def test_the_gap_of_a_loss_without_symmetry_is_given_by_both_corrections():
    def loss(scores):
        z = scores[..., 0, 0, :]
        return (z[..., 0] + z[..., 0] ** 2 / 2 - z[..., 1]) ** 2

    found = []
    for dim in (50, 200):
        task = Task(dim=dim, loss=loss, student_scale=1.0, teacher_scale=1.0)
        gap = population_gap(task.potential, task.matrices(0), samples=20_000)
        # A polynomial of degree four: controls and corrections are both exact.
        assert gap.gap == pytest.approx(gap.third + gap.fourth, rel=1e-8)
        found.append(gap.third * dim**0.5)
    assert found[0] == pytest.approx(found[1], rel=0.15)


@pytest.mark.parametrize("centred", [True, False])
def test_the_gap_with_correlated_tokens_and_matrices_without_symmetry(centred):
    task = Task(
        dim=30, activation="tanh", tokens=2, covariance=[[1.0, 0.4], [0.4, 1.5]], attention="direct", teacher="gaussian"
    )
    gap = population_gap(task.potential, task.matrices(0), samples=60_000, centred=centred)
    assert abs(gap.gap - gap.third - gap.fourth) < 4 * gap.error + 20 / 30**2
    assert abs(gap.gap) > 5 * gap.error


def test_the_smallest_risk_is_zero_where_the_teacher_can_be_reached():
    for name in ("h1", "h2", "h3"):
        assert minimum_risk(Task(activation=name)).value == pytest.approx(0, abs=1e-9)
        assert minimum_risk(Task(activation=name, attention="direct")).value == pytest.approx(0, abs=1e-9)
    assert minimum_risk(Task(activation="h1", teacher="symmetric")).value > 0.1


def test_the_smallest_risk_of_a_student_of_low_rank_is_what_the_cut_eigenvalues_hold():
    task = Task(activation="h1", student_ratio=0.25)
    found = minimum_risk(task)
    generator = np.random.default_rng(0)
    w = generator.standard_normal((800, 800)) * (0.5 / 800) ** 0.5
    cut = np.sort(np.linalg.eigvalsh(w @ w.T))[:600]
    assert found.value == pytest.approx(2 * (cut**2).sum() / 800, rel=0.02)


@pytest.mark.parametrize("students", [(1.0,), (1.0, 1.0), (1.0, 1.0, 1.0)])
def test_direct_students_without_enough_heads_keep_a_risk(students):
    task = Task(attention="direct", activation="tanh", student_ratio=students, teacher_ratio=(1.0, 1.0), teacher="symmetric")
    found = minimum_risk(task)
    if len(students) == 1:
        # Two heads of zero overlap: no single matrix gives their sum of outputs, one that is as good as none is beaten.
        nothing = task.potential.value(np.diag([0.0, 0.5, 0.5]))
        assert 0.05 * nothing < found.value < 0.9 * nothing
    else:
        assert found.value < 1e-7


def test_the_smallest_risk_of_one_linear_head_for_two_teachers_is_zero():
    task = Task(attention="direct", activation="h1", student_ratio=1.0, teacher_ratio=(1.0, 0.5))
    assert minimum_risk(task).value == pytest.approx(0, abs=1e-8)


def test_a_direct_solution_ends_at_the_smallest_risk():
    task = Task(attention="direct", activation="tanh", student_ratio=1.0, teacher_ratio=(1.0, 1.0), teacher="symmetric")
    best = minimum_risk(task)
    end = solve(task, t_eval=[20.0], rtol=1e-5)
    assert end["loss"][0] == pytest.approx(best.value, rel=1e-4)
    np.testing.assert_allclose(best.omega[1:, 1:], 0.5 * np.eye(2), atol=1e-12)


def test_a_tied_student_imitates_the_negative_part_where_the_loss_asks_for_it():
    def loss(scores):
        z = scores[..., 0, 0, :]
        return (z[..., 0] + z[..., 1]) ** 2

    found = minimum_risk(Task(loss=loss, teacher="traceless", student_ratio=0.3))
    x = np.linalg.eigvalsh(Task(dim=600, teacher="traceless").matrices(0)[1].numpy())
    left = (x**2).sum() - (np.sort(x)[:180].clip(max=0) ** 2).sum()
    assert found.psi[0, 1] < 0
    assert found.value == pytest.approx(2 * left / 600, rel=0.02)


def test_bad_input_of_gap_and_risk_is_refused():
    task = Task(dim=10)
    with pytest.raises(ValueError, match="`matrices` must be 2"):
        population_gap(task.potential, task.matrices()[:1])
    with pytest.raises(ValueError, match="`samples` must be >= 1000"):
        population_gap(task.potential, task.matrices(), samples=10)
    with pytest.raises(ValueError, match=r"`aim.minimum_risk` of tied attention needs one trained student"):
        minimum_risk(Task(student_ratio=(1.0, 1.0)))
