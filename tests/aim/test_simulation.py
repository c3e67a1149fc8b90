import numpy as np
import pytest
import torch

import specgrad
from specgrad.aim import Task, correlation, records, simulate, solve
from specgrad.aim.observables import word_moment
from specgrad.aim.scores import Batch, Model
from specgrad.runs import stream

# Settings whose SGD noise is small, with the largest error that it leaves, relative to the largest entry.
RUNS = {
    "tied h1": (Task(dim=60, activation="h1"), 0.005, 0.3, 0.02),
    "tied h2": (Task(dim=60, activation="h2"), 0.002, 0.05, 0.04),
    "tied softmax": (Task(dim=60, activation="softmax", tokens=2), 0.03, 1.0, 0.03),
    "tied softmax, three tokens": (Task(dim=40, activation="softmax", tokens=3), 0.02, 0.4, 0.03),
    "tied, correlated tokens, decay": (
        Task(dim=40, activation="tanh", tokens=2, covariance=[[1.0, 0.4], [0.4, 1.5]], weight_decay=1.0), 0.01, 0.2, 0.03,
    ),
    "tied, two heads": (
        Task(dim=40, student_ratio=(0.5, 0.5), teacher_ratio=(0.5, 0.5), activation="tanh"), 0.01, 0.4, 0.04,
    ),
    "direct h1": (Task(dim=60, activation="h1", attention="direct"), 0.02, 0.3, 0.02),
    "direct, correlated tokens, no symmetry": (
        Task(
            dim=40, activation="tanh", tokens=2, covariance=[[1.0, 0.4], [0.4, 1.5]], attention="direct",
            teacher="gaussian", weight_decay=0.5,
        ), 0.02, 0.3, 0.03,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_sgd_follows_the_theory_of_its_own_draw(name):
    task, lr, t_max, tolerance = RUNS[name]
    run = simulate(task, lr=lr, batch_size=512, t_eval=np.linspace(0, t_max, 4), seeds=1)
    for place, seed in enumerate(run["seeds"]):
        theory = solve(task, t_eval=run["t"], seed=int(seed), tol=1e-3)
        scale = np.abs(theory["q11" if task.attention == "tied" else "Omega11"]).max()
        columns = [c for c in theory if c in run and c not in ("t", "loss", "overlap") and not c.startswith("p")]
        assert len(columns) >= 5
        for column in columns:
            assert np.abs(run[column][place] - theory[column]).max() < tolerance * scale, column
        assert np.abs(run["loss"][place] - theory["loss"]).max() < 3 * tolerance * theory["loss"].max()


@pytest.mark.parametrize(
    "name", ["tied, correlated tokens, decay", "direct, correlated tokens, no symmetry", "tied, two heads"]
)
def test_gradients_equal_automatic_differentiation(name):
    task = RUNS[name][0]
    model = Model.start(task, [0, 1], torch.device("cpu"), torch.float64, rotate=False)
    batch = Batch(task, 2, 7, torch.device("cpu"), torch.float64)
    batch.draw([stream(s, "samples") for s in (0, 1)])
    for w in model.trained.values():
        w.requires_grad_()
    scores = model.scores(batch)
    total = task.potential.scores.function(scores).mean(1).sum()
    total = total + sum(task.weight_decay / (2 * task.dim) * (w**2).sum() for w in model.trained.values())
    expected = torch.autograd.grad(total, list(model.trained.values()))
    with torch.no_grad():
        _, slope = model.loss_and_slope(scores.detach())
        found = model.gradients(batch, slope)
    for got, want in zip(found.values(), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


def test_a_seed_does_not_depend_on_its_company_and_float32_follows_float64():
    task = Task(dim=30, activation="h2")
    both = simulate(task, lr=0.005, batch_size=64, t_max=0.05, seeds=[3, 5])
    alone = simulate(task, lr=0.005, batch_size=64, t_max=0.05, seeds=[5])
    np.testing.assert_allclose(both["q12"][1], alone["q12"][0], rtol=1e-6)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-4)):
        again = simulate(task, lr=0.005, batch_size=64, t_max=0.05, seeds=[5], dtype=dtype)
        repeat = simulate(task, lr=0.005, batch_size=64, t_max=0.05, seeds=[5], dtype=dtype)
        np.testing.assert_allclose(again["q12"], repeat["q12"], rtol=tolerance)


@pytest.mark.parametrize("attention", ["tied", "direct"])
@pytest.mark.parametrize("teacher", ["wishart", "symmetric", "traceless"])
def test_sgd_runs_in_the_eigenbasis_of_every_symmetric_teacher(attention, teacher):
    for dim in (20, 33, 100):
        task = Task(dim=dim, attention=attention, teacher=teacher)
        model = Model.start(task, [0, 1], torch.device("cpu"), torch.float32, rotate=True)
        assert model.frozen[1].shape == (2, dim)


def test_running_in_the_eigenbasis_of_the_teacher_changes_the_law_in_nothing():
    task = Task(dim=40, activation="h2", teacher_ratio=0.5)
    times = np.linspace(0, 0.1, 3)
    rotated = simulate(task, lr=0.004, batch_size=512, t_eval=times, seeds=3)
    plain = simulate(task, lr=0.004, batch_size=512, t_eval=times, seeds=3, optimizer=lambda p: torch.optim.SGD(p, lr=0.004))
    np.testing.assert_allclose(rotated["q12"][:, 0], plain["q12"][:, 0], rtol=1e-5)
    np.testing.assert_allclose(rotated["q12"].mean(0), plain["q12"].mean(0), rtol=0.03)


@pytest.mark.parametrize("optimizer", ["Muon", "SpecGD", "SignSGD", "AdamW"])
@pytest.mark.parametrize("attention", ["tied", "direct"])
def test_any_optimizer_trains_the_students_and_leaves_the_teachers(optimizer, attention):
    def factory(parameters):
        if optimizer == "AdamW":
            return torch.optim.AdamW(parameters, lr=0.01)
        return getattr(specgrad.optim, optimizer)(parameters, lr=0.01)

    task = Task(dim=24, activation="h1", attention=attention)
    run = simulate(task, lr=0.02, batch_size=64, t_max=0.2, seeds=2, optimizer=factory)
    own = "q11" if attention == "tied" else "Omega11"
    assert (np.abs(run[own][:, -1] - run[own][:, 0]) > 1e-3).all()
    np.testing.assert_allclose(run["t2"], np.broadcast_to(run["t2"][:, :1], run["t2"].shape), rtol=1e-6)


def test_words_spectra_and_tables():
    task = Task(dim=20, activation="h1")
    run = simulate(task, lr=0.01, batch_size=16, t_eval=[0.0, 0.02], seeds=2, words=[(1, 1, 2), (1, 2)], spectra=True)
    assert run["mu112"][0, 0] == pytest.approx(word_moment(task.matrices(0), (1, 1, 2)), rel=1e-5)
    np.testing.assert_allclose(run["mu12"], run["q12"], rtol=1e-6)
    assert run["spectrum1"].shape == (2, 2, 20)
    np.testing.assert_allclose(run["spectrum1"].mean(-1), run["t1"], rtol=1e-5)
    rows = records(run, method="sgd")
    assert len(rows) == 4
    theory = records(solve(task, t_eval=run["t"]))
    assert set(theory[0]) <= set(rows[0]) | {"t"}
    assert np.abs(correlation(run)).max() <= 1


def test_divergence_is_told_with_the_step_and_the_size_and_rejection_prevents_it():
    task = Task(dim=40, activation="h3")
    said = r"diverged at step \d+ for seeds \[3\]: the largest score \|G\| is .* set guard='clip'"
    with pytest.raises(FloatingPointError, match=said):
        simulate(task, lr=0.3, batch_size=32, t_max=1.0, seeds=[3])
    with pytest.raises(FloatingPointError, match=r"lower `guard_level` \(4; "):
        simulate(task, lr=0.3, batch_size=32, t_max=2.0, guard="reject")
    held = simulate(Task(dim=64, activation="h3"), lr=0.02, batch_size=512, t_eval=[0.6], guard="reject", guard_level=1.0)
    assert held["q12"][0, 0] > 0.3
    calm = simulate(task, lr=0.002, batch_size=64, t_max=0.02, guard="reject", guard_level=0.8)
    assert 0 < calm["rejected"][0] < 0.2
    assert np.isfinite(calm["q11"]).all()
    clipped = simulate(task, lr=0.002, batch_size=64, t_max=0.02, guard="clip", guard_level=0.8)
    assert clipped["rejected"][0] > 0


def test_a_run_can_be_watched_and_stopped():
    seen = []
    run = simulate(
        Task(dim=20, activation="h1"), lr=0.02, batch_size=16, t_max=1.0, on_step=lambda n, _: seen.append(n),
        should_stop=lambda: len(seen) == 3,
    )  # fmt: skip
    assert len(run["t"]) == 3
    assert seen == run["step"].tolist()


def test_a_loss_with_kinks_can_be_trained_but_has_no_potential():
    run = simulate(Task(dim=20, activation=torch.relu), lr=0.01, batch_size=32, t_eval=[0.0, 0.05])
    assert np.isnan(run["loss"]).all()
    assert np.isfinite(run["batch_loss"][0, 1])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": 0.0, "t_max": 1.0}, "`lr` of `aim.simulate` must be finite and > 0"),
        ({"lr": 0.1}, "`t_max` or `t_eval`"),
        ({"lr": 0.1, "t_eval": [0.2, 0.1]}, "ascending"),
        ({"lr": 0.1, "t_eval": []}, "ascending"),
        ({"lr": 1.0, "t_max": 0.05}, "must reach one step, 0.2 at"),
        ({"lr": 0.1, "t_max": 1.0, "optimizer": "muon"}, "`optimizer` of `aim.simulate` must be 'sgd' or a function"),
        ({"lr": 0.1, "t_max": 1.0, "words": [(1, 3)]}, "`words` of `aim.simulate` must hold tuples of indices from 1 to 2"),
        ({"lr": 0.1, "t_max": 1.0, "batch_size": 0}, "`batch_size`"),
        ({"lr": 0.1, "t_max": 1.0, "seeds": [1, 1]}, "`seeds` of `aim.simulate` must be distinct"),
        ({"lr": 0.1, "t_max": 1.0, "guard": "drop"}, "`guard` of `aim.simulate`"),
        ({"lr": 0.1, "t_max": 1.0, "dtype": torch.float16}, "`dtype` of `aim.simulate`"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        simulate(Task(dim=20), **settings)


def test_a_task_without_dimension_cannot_be_simulated():
    with pytest.raises(ValueError, match=r"`dim` of `aim.Task` must be given for `aim.simulate`"):
        simulate(Task(), lr=0.1, t_max=1.0)


@pytest.mark.parametrize("attention", ["tied", "direct"])
def test_the_overlap_is_the_share_of_the_first_teacher(attention):
    task = Task(dim=20, attention=attention, activation="h1", student_ratio=(1.0, 0.5), teacher_ratio=1.0)
    run = simulate(task, lr=0.01, batch_size=16, t_eval=[0.0, 0.05], seeds=2)
    name = "p" if attention == "tied" else "pOmega"
    assert run["overlap"] == pytest.approx(run[f"{name}13"] / run[f"{name}33"])
    assert solve(task, t_eval=[0.0], tol=0.5)["overlap"].shape == (1,)


def test_mse_is_another_name_of_the_squared_loss():
    first, second = (Task(dim=16, activation="h1", loss=loss) for loss in ("squared", "mse"))
    ends = [solve(task, t_eval=[0.0, 0.1], seed=0) for task in (first, second)]
    assert ends[0]["method"] == ends[1]["method"] == "flow"
    assert ends[0]["q12"].tolist() == ends[1]["q12"].tolist()
