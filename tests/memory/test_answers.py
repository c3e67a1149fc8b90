"""Facts that share answers, as cities share countries: M outputs compete for N items."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specgrad import memory
from specgrad.memory import Task

ANSWERS = torch.from_numpy(np.random.default_rng(0).integers(0, 37, 403))
TASK = Task(num_items=403, dim=7, alpha=1.5, seed=3, answers=ANSWERS)


def autograd_loss(task, weight, q):
    logits = task.embeddings @ weight.T @ task.unembeddings.T
    return torch.nn.functional.cross_entropy(logits, task.answers, reduction="none") @ q


def random_weight(dim, scale, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(dim, dim, generator=generator, dtype=torch.float64)


def test_outputs_are_as_many_as_answers():
    assert TASK.num_outputs == 37 == len(TASK.unembeddings)
    assert len(TASK.embeddings) == 403
    for start, u, v in TASK.chunks(100):
        assert torch.equal(u, TASK.unembeddings[ANSWERS[start : start + len(u)]])
        assert torch.equal(v, TASK.embeddings[start : start + len(v)])


@pytest.mark.parametrize("scale", [0.0, 0.5, 50.0])
@pytest.mark.parametrize("batch_size", [None, 40])
def test_gradient_loss_and_hessian_equal_autograd(scale, batch_size):
    weight = random_weight(7, scale).requires_grad_()
    q = TASK.frequencies if batch_size is None else TASK.sample(batch_size)
    loss = autograd_loss(TASK, weight, q)
    (expected,) = torch.autograd.grad(loss, weight)
    got, value = memory.gradient_and_loss(TASK, weight.detach(), q)
    torch.testing.assert_close(got, -expected, rtol=1e-11, atol=1e-13)
    assert value == pytest.approx(loss.item(), rel=1e-12)
    along = random_weight(7, 1.0, seed=1)
    _, expected = torch.autograd.functional.hvp(lambda w: autograd_loss(TASK, w, q), weight.detach(), along)
    torch.testing.assert_close(memory.hessian_product(TASK, along, weight.detach(), q), expected, rtol=1e-9, atol=1e-12)


@settings(max_examples=30, deadline=None)
@given(
    items=st.integers(2, 1500),
    outputs=st.integers(2, 1500),
    dim=st.integers(1, 12),
    seed=st.integers(0, 1000),
    identity=st.floats(0, 3),
)
def test_pruned_scoring_and_margins_equal_the_definition(items, outputs, dim, seed, identity):
    drawn = Task(max(items, outputs), dim, 1.5, seed=seed)
    answers = torch.from_numpy(np.random.default_rng(seed).integers(0, outputs, items))
    v = drawn.embeddings[:items] + identity * drawn.unembeddings[answers]
    task = Task.from_arrays(drawn.unembeddings[:outputs], v, torch.ones(items), answers=answers)
    weight = random_weight(dim, 0.3, seed) + torch.eye(dim, dtype=torch.float64)
    mask = memory.recovered(task, weight)
    assert torch.equal(mask, memory.recovered_by_definition(task, weight, rows=97))
    assert torch.equal(memory.margins(task, weight, torch.arange(items)) > 0, mask)


def test_items_of_one_answer_do_not_compete_and_equal_outputs_tie():
    u = torch.eye(3, dtype=torch.float64)
    task = Task.from_arrays(u, u[[0, 0, 1, 2]], torch.ones(4), answers=[0, 0, 1, 2])
    assert memory.recovered(task, u).tolist() == [True, True, True, True]
    twins = Task.from_arrays(u[[0, 0, 1]], u[[0, 0, 1, 2]], torch.ones(4), answers=[0, 1, 2, 2])
    assert memory.recovered(twins, u).tolist() == [False, False, True, False]


def test_distinct_answers_are_the_task_without_them():
    plain = Task(300, 8, 1.5)
    same = Task(300, 8, 1.5, answers=torch.arange(300))
    weight = memory.one_step(plain, "muon")
    torch.testing.assert_close(memory.one_step(same, "muon"), weight, rtol=0, atol=1e-12)
    assert torch.equal(memory.recovered(same, weight), memory.recovered(plain, weight))
    got, expected = (memory.estimate_gradient(task, 3 * weight, rows=20, columns=5) for task in (same, plain))
    torch.testing.assert_close(got.gradient, expected.gradient, rtol=0, atol=1e-12)


@pytest.mark.filterwarnings("ignore::specgrad.memory.MeanFieldWarning")
@pytest.mark.parametrize("columns", [0, 10])
def test_approximate_gradients_leave_the_answer_out(columns):
    weight = random_weight(7, 1e-7)
    got = memory.estimate_gradient(TASK, weight, method="mean-field", columns=columns)
    exact = memory.gradient(TASK, weight)
    assert (got.gradient - exact).norm() < 1e-12 * exact.norm()
    weight = random_weight(7, 0.7)
    exact = memory.gradient(TASK, weight)
    got = memory.estimate_gradient(TASK, weight, rows=402, columns=columns)
    assert (got.gradient - exact).norm() < 1e-4 * exact.norm()
    assert got.loss == pytest.approx(memory.loss(TASK, weight), rel=1e-4)


def test_streamed_and_held_tasks_agree():
    streamed = Task(403, 7, 1.5, seed=3, answers=ANSWERS, storage="stream")
    weight = random_weight(7, 0.5)
    torch.testing.assert_close(memory.gradient(streamed, weight), memory.gradient(TASK, weight), rtol=0, atol=1e-13)
    assert torch.equal(memory.recovered(streamed, weight), memory.recovered(TASK, weight))


def test_muon_stores_shared_answers_in_few_steps():
    run = memory.simulate(TASK, "muon", 4, with_loss=True)
    assert run.column("loss") == sorted(run.column("loss"), reverse=True)
    assert run.records[-1]["accuracy"] > run.records[0]["accuracy"] > 0


@pytest.mark.parametrize("update", ["newton", "whitened_muon"])
def test_fewer_outputs_than_dimensions_leave_null_directions_alone(update):
    # Three outputs span a plane after centring: Sigma_u has rank 2.
    task = Task.from_counts(np.arange(1, 200), dim=16, answers=[i % 3 for i in range(199)])
    weight = memory.one_step(task, update)
    assert torch.linalg.matrix_rank(weight, rtol=1e-8) == 2
    assert weight.norm() < 1e4 * memory.gradient(task).norm()


def test_names_become_outputs_in_order_of_their_most_frequent_item():
    names = ["Chile", "Peru", "Chile", "Bolivia"]
    for answers in (names, np.array(names)):
        task = Task.from_counts([1, 4, 3, 2], dim=4, answers=answers)
        assert task.frequencies.tolist() == [0.4, 0.3, 0.2, 0.1]
        assert task.answers.tolist() == [0, 1, 2, 1]


def test_bad_answers_are_refused(unchecked_types):
    one = np.ones((3, 2))
    for make, message in (
        (lambda: Task(4, 2, 1.5, answers=torch.zeros(4, dtype=torch.int64)), "at least two different answers"),
        (
            lambda: Task(4, 2, 1.5, answers=torch.arange(3)),
            r"must be int64 of shape \(4,\); got torch.int64 of shape \(3,\)",
        ),
        (lambda: Task(4, 2, 1.5, answers=torch.ones(4)), "must be int64 of shape"),
        (lambda: Task(4, 2, 1.5, answers=torch.arange(4) - 1), "must be numbers of outputs, 0 to 2; got -1 to 2"),
        (lambda: Task.from_arrays(one, one, np.ones(3), answers=[0, 1, 3]), "numbers of outputs, 0 to 2; got 0 to 3"),
        (lambda: Task.from_arrays(one, np.ones((4, 3)), np.ones(4), answers=[0, 1, 2, 0]), r"\(M, d\) and \(N, d\)"),
        (lambda: Task.from_counts([1, 2], 2, answers=["a"]), "must be one for each of 2 counts; got 1"),
        (lambda: Task.from_counts([1, 2], 2, answers=["a", "a"]), "at least two different answers; got one"),
    ):
        with pytest.raises(ValueError, match=message):
            make()
