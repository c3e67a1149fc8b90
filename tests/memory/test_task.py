import numpy as np
import pytest
import torch

from specgrad.data import shakespeare, word_counts
from specgrad.memory import Task, checks, gradient, recovered
from specgrad.memory.embeddings import ROWS_PER_STREAM


def test_rows_are_those_of_one_numpy_generator_per_matrix():
    task = Task(num_items=500, dim=8, alpha=1.5, seed=7)
    for rows, stream in ((task.unembeddings, 0), (task.embeddings, 1)):
        expected = np.random.default_rng([7, stream]).standard_normal((500, 8)) / np.sqrt(8)
        np.testing.assert_allclose(rows.numpy(), expected, rtol=1e-15)


def test_batches_are_multinomial_and_fresh_in_every_step():
    task = Task(num_items=500, dim=8, alpha=1.5, seed=7)
    expected = np.random.default_rng([7, 2, 3]).multinomial(64, task.frequencies.numpy()) / 64
    np.testing.assert_array_equal(task.sample(64, step=3).numpy(), expected)
    assert not torch.equal(task.sample(64, step=4), task.sample(64, step=3))


def test_streamed_rows_equal_those_in_memory_across_the_border_of_a_stream():
    items = ROWS_PER_STREAM + 3000
    held = Task(items, 4, 1.5, seed=1, unit_norm=True, kappa_v=0.5)
    streamed = Task(items, 4, 1.5, seed=1, unit_norm=True, kappa_v=0.5, storage="stream")
    for held_rows, rows in ((held.embeddings, "embeddings"), (held.unembeddings, "unembeddings")):
        assert torch.equal(torch.cat([block for _, block in streamed.half(rows, 1000)]), held_rows)
        picked = torch.tensor([0, 5, 4096, ROWS_PER_STREAM - 1, ROWS_PER_STREAM, items - 1])
        assert torch.equal(streamed.pick(rows, picked), held_rows[picked])
    assert torch.equal(streamed.embeddings, held.embeddings)


def test_covariances_follow_kappa_and_have_trace_one():
    task = Task(40_000, 6, 1.5, kappa_u=1.0)
    variances = task.unembeddings.square().mean(0)
    expected = 1 / torch.arange(1, 7, dtype=torch.float64)
    # The standard error of a variance from 40,000 values is 0.7 %.
    torch.testing.assert_close(variances, expected / expected.sum(), rtol=0.04, atol=0)
    assert task.embeddings.square().sum(1).mean().item() == pytest.approx(1, rel=0.02)


def test_unit_norm_rows_have_length_one():
    task = Task(100, 5, 1.5, unit_norm=True)
    torch.testing.assert_close(task.embeddings.norm(dim=1), torch.ones(100, dtype=torch.float64))


def test_a_float32_task_is_the_rounding_of_the_float64_one():
    assert torch.equal(Task(100, 5, 1.5, dtype=torch.float32).embeddings, Task(100, 5, 1.5).embeddings.float())


def test_arrays_are_taken_as_they_are_and_frequencies_normalised():
    drawn = Task(300, 6, 1.5)
    task = Task.from_arrays(drawn.unembeddings.numpy(), drawn.embeddings.numpy(), 5 * drawn.frequencies.numpy())
    assert torch.equal(task.unembeddings, drawn.unembeddings)
    torch.testing.assert_close(gradient(task), gradient(drawn), rtol=0, atol=1e-15)


def test_counts_are_sorted_and_normalised():
    task = Task.from_counts([1, 5, 4], dim=3)
    assert task.frequencies.tolist() == [0.5, 0.4, 0.1]
    assert task.alpha is None


def test_word_frequencies_of_shakespeare_are_real_and_heavy_tailed():
    words, counts = word_counts(shakespeare())
    assert words[:3] == ["the", "and", "i"]
    assert np.all(np.diff(counts) <= 0)
    assert len(words) == len(set(words)) > 20_000
    # Zipf's law: rank times frequency varies by a small factor over two decades where the frequencies vary by 100.
    ranks = np.array([10, 100, 1000])
    products = ranks * counts[ranks - 1]
    assert products.max() / products.min() < 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"alpha": 0.9}, "`alpha` of `memory.Task` must be > 1 so that frequencies are summable; got 0.9"),
        ({"alpha": 1.0}, "`alpha` of `memory.Task` must be > 1"),
        ({"alpha": float("nan")}, "`alpha` of `memory.Task` must be > 1"),
        ({"alpha": None}, "`alpha` of `memory.Task` must be a number > 1; got None"),
        ({"num_items": 1}, "`num_items` of `memory.Task` must be >= 2; got 1"),
        ({"dim": 0}, "`dim` of `memory.Task` must be >= 1; got 0"),
        ({"seed": -1}, "`seed` of `memory.Task` must be >= 0; got -1"),
        ({"kappa_v": -1.0}, "`kappa_v` of `memory.Task` must be finite and >= 0"),
        ({"storage": "disk"}, "`storage` of `memory.Task` must be memory or stream; got 'disk'"),
        ({"dtype": torch.bfloat16}, "`dtype` of `memory.Task` must be torch.float32 or torch.float64"),
        ({"split": True}, "`split` of `memory.Task` needs an initialised torch.distributed"),
    ],
)
def test_bad_settings_are_refused(unchecked_types, settings, message):
    with pytest.raises(ValueError, match=message):
        Task(**{"num_items": 10, "dim": 2, "alpha": 1.5} | settings)


def test_what_cannot_fit_is_refused_before_anything_is_drawn():
    with pytest.raises(MemoryError, match=r"needs about .* GiB.*storage='stream'"):
        Task(num_items=10**9, dim=4096, alpha=1.5)


def test_limits_of_a_container_or_job_count(tmp_path):
    job = tmp_path / "root" / "slurm" / "job"
    job.mkdir(parents=True)
    (tmp_path / "self").write_text("0::/slurm/job\n")
    for folder, most in ((job, "max"), (job.parent, "1000")):
        (folder / "memory.max").write_text(f"{most}\n")
        (folder / "memory.current").write_text("700\n")
        (folder / "memory.stat").write_text("anon 500\ninactive_file 200\n")
    assert checks._free_in_groups(tmp_path / "root", tmp_path / "self") == [500]
    assert checks._free_in_groups(tmp_path / "nothing", tmp_path / "self") == []
    assert checks._free_in_groups(tmp_path / "root", tmp_path / "nothing") == []


def test_batch_sizes_below_one_are_refused():
    with pytest.raises(ValueError, match=r"`batch_size` of `memory.Task.sample` must be >= 1; got 0"):
        Task(10, 2, 1.5).sample(0)
    with pytest.raises(ValueError, match=r"`step` of `memory.Task.sample` must be >= 0; got -1"):
        Task(10, 2, 1.5).sample(1, -1)


def arrays(**changes):
    good = {"unembeddings": np.ones((5, 2)), "embeddings": np.ones((5, 2)), "frequencies": np.ones(5)}
    return good | changes


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (arrays(embeddings=np.ones((4, 2))), r"must have shape \(N, d\), the same for both; got \(5, 2\) and \(4, 2\)"),
        (arrays(unembeddings=np.ones(5)), r"must have shape \(N, d\)"),
        (arrays(embeddings=np.full((5, 2), np.nan)), "`embeddings` of .* must be finite; got NaN"),
        (arrays(embeddings=np.ones((5, 2), dtype=np.float32)), "must be float32 or float64, the same for both"),
        (arrays(frequencies=np.ones(4)), r"`frequencies` of .* must have shape \(5,\); got \(4,\)"),
        (arrays(frequencies=np.array([1, 1, 1, 1, -1.0])), "`frequencies` of .* must be finite, >= 0"),
        (arrays(frequencies=np.array([1, 1, 1, 1, np.nan])), "`frequencies` of .* must be finite, >= 0"),
        (arrays(frequencies=np.zeros(5)), "`frequencies` of .* must be finite, >= 0 and not all 0"),
    ],
)
def test_bad_arrays_are_refused(unchecked_types, bad, message):
    with pytest.raises(ValueError, match=message):
        Task.from_arrays(**bad)


def test_weights_and_frequencies_that_do_not_fit_are_refused(unchecked_types):
    task = Task(10, 2, 1.5)
    for call in (lambda w: recovered(task, w), lambda w: gradient(task, w)):
        with pytest.raises(ValueError, match=r"`weight` must have shape \(2, 2\); got \(3, 3\)"):
            call(torch.zeros(3, 3))
        with pytest.raises(ValueError, match=r"`weight` must be finite; got NaN"):
            call(torch.full((2, 2), torch.nan))
    with pytest.raises(ValueError, match=r"`frequencies` must have shape \(10,\); got \(9,\)"):
        gradient(task, None, torch.ones(9))
    with pytest.raises(ValueError, match=r"`frequencies` must be finite and >= 0"):
        gradient(task, None, -torch.ones(10))


def test_numbers_that_are_no_integers_are_refused(unchecked_types):
    for name in ("num_items", "dim", "seed"):
        with pytest.raises(ValueError, match=rf"`{name}` of `memory.Task` must be an integer; got 100.0"):
            Task(**{"num_items": 10, "dim": 2, "alpha": 1.5} | {name: 1e2})
    with pytest.raises(ValueError, match=r"`batch_size` of `memory.Task.sample` must be an integer; got 10.0"):
        Task(10, 2, 1.5).sample(10.0)
    assert Task(np.int64(10), np.int32(2), 1.5).embeddings.shape == (10, 2)


def test_frequencies_that_sum_to_one_only_in_float32_can_be_sampled():
    for alpha in (1.2, 1.5, 2.0):
        p = Task(200_000, 1, alpha).frequencies.float()
        p *= 1 + 1e-7
        u = torch.zeros(200_000, 1)
        assert Task.from_arrays(u, u, p).sample(100).sum().item() == pytest.approx(1)


def test_reversed_arrays_and_parameters_are_taken():
    u = np.arange(6.0).reshape(3, 2)
    task = Task.from_arrays(u[::-1], torch.nn.Parameter(torch.ones(3, 2, dtype=torch.float64)), np.ones(3))
    assert task.unembeddings.tolist() == u[::-1].tolist()
    assert not task.embeddings.requires_grad


def test_counts_that_are_no_sequence_of_numbers_are_refused(unchecked_types):
    with pytest.raises(ValueError, match=r"`counts` of `memory.Task.from_counts` must be numbers; got a mapping"):
        Task.from_counts({"a": 2, "b": 1}, dim=2)
    for words in (["a", "b"], np.array(["a", "b"])):
        with pytest.raises(ValueError, match=r"`counts` of `memory.Task.from_counts` must be numbers; got others"):
            Task.from_counts(words, dim=2)
