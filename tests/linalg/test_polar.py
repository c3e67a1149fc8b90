import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from specgrad.linalg import polar_factor
from specgrad.linalg.polar import ZOLOTAREV
from specgrad.linalg.zolotarev import polar_zolotarev, rational_sign

MODES = ["fast", "robust", "exact", "strict"]
SHAPES = [(1, 1), (1, 7), (7, 1), (16, 16), (40, 12), (12, 40), (3, 8, 5), (2, 3, 4, 4)]


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    return (torch.linalg.norm(got.double() - expected.double()) / torch.linalg.norm(expected.double())).item()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mode", list(ZOLOTAREV))
def test_singular_values_inside_the_interval_land_within_the_equioscillation_error(shape, mode):
    generator = torch.Generator().manual_seed(len(shape) + shape[-1])
    u, s, vh = torch.linalg.svd(torch.randn(*shape, generator=generator, dtype=torch.float64), full_matrices=False)
    matrix = u @ torch.diag_embed(torch.linspace(1, 0.01, s.shape[-1], dtype=torch.float64)) @ vh
    values = torch.linalg.svdvals(polar_factor(matrix, mode=mode))
    poles, interval = ZOLOTAREV[mode]
    assert (values - 1).abs().max() <= 1.1 * rational_sign(poles, interval).error


@pytest.mark.parametrize("mode, bound", [("fast", 0.16), ("robust", 0.031), ("strict", 1e-6)])
def test_error_to_the_float64_polar_factor_on_random_matrices_stays_at_the_level_of_its_mode(mode, bound):
    generator = torch.Generator().manual_seed(0)
    for shape in ((128, 128), (64, 256), (256, 64)):
        matrix = torch.randn(*shape, generator=generator)
        assert relative(polar_factor(matrix, mode=mode), polar_factor(matrix.double(), method="svd")) <= bound


@settings(deadline=None, max_examples=25)
@given(
    rows=st.integers(1, 12), cols=st.integers(1, 12), seed=st.integers(0, 10**6), mode=st.sampled_from(["fast", "robust"])
)
def test_direction_is_equivariant_under_rotations_of_both_sides(rows, cols, seed, mode):
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(rows, cols, generator=generator, dtype=torch.float64)
    left, _ = torch.linalg.qr(torch.randn(rows, rows, generator=generator, dtype=torch.float64))
    right, _ = torch.linalg.qr(torch.randn(cols, cols, generator=generator, dtype=torch.float64))
    turned = polar_factor(left @ matrix @ right, mode="strict")
    torch.testing.assert_close(turned, left @ polar_factor(matrix, mode="strict") @ right, atol=1e-6, rtol=0)
    # The rational method estimates the largest singular value from a column, so its scale turns with the basis by 5 %.
    turned = polar_factor(left @ matrix @ right, mode=mode)
    assert torch.linalg.matrix_norm(turned, 2) <= 1.25


@pytest.mark.parametrize("shape", [(24, 10), (10, 24)])
def test_polar_factor_of_the_transpose_is_the_transpose_bit_for_bit(shape):
    matrix = torch.randn(*shape, generator=torch.Generator().manual_seed(1))
    assert torch.equal(polar_factor(matrix.mT.contiguous()), polar_factor(matrix).mT)


@pytest.mark.parametrize("scale", [1e-36, 1e-30, 1e-12, 1e12, 1e30])
def test_result_does_not_depend_on_the_scale_of_the_input(scale):
    matrix = torch.rand(20, 30, generator=torch.Generator().manual_seed(2)) + 0.5
    for mode in ZOLOTAREV:
        torch.testing.assert_close(
            polar_factor(matrix * scale, mode=mode), polar_factor(matrix, mode=mode), atol=2e-4, rtol=0
        )


def test_zero_in_gives_exact_zero_out_and_neighbours_in_the_batch_are_untouched():
    batch = torch.randn(4, 6, 9, generator=torch.Generator().manual_seed(3))
    alone = [polar_factor(matrix) for matrix in batch]
    batch[1] = 0
    batch[2, 3, 4] = torch.inf
    for method in ("zolotarev", "svd"):
        got = polar_factor(batch, method=method)
        assert torch.equal(got[1], torch.zeros(6, 9))
        assert got[2].isnan().all()
        if method == "zolotarev":
            torch.testing.assert_close(got[0], alone[0], atol=1e-5, rtol=0)
            torch.testing.assert_close(got[3], alone[3], atol=1e-5, rtol=0)


@pytest.mark.parametrize("method, mode", [("zolotarev", "fast"), ("zolotarev", "robust"), ("svd", "strict")])
def test_rank_one_input_leaks_at_most_1e5_of_the_energy_outside_its_direction(method, mode):
    generator = torch.Generator().manual_seed(4)
    u, v = torch.randn(512, 1, generator=generator), torch.randn(1, 512, generator=generator)
    got = polar_factor(u @ v, method=method, mode=mode).double()
    direction = (u @ v).double() / torch.linalg.norm((u @ v).double())
    inside = (got * direction).sum() ** 2
    assert 1 - inside / got.square().sum() <= 1e-5


def test_svd_maps_null_directions_to_zero_instead_of_completing_the_isometry():
    generator = torch.Generator().manual_seed(5)
    for dtype in (torch.float32, torch.float64):
        low = torch.randn(30, 4, generator=generator, dtype=dtype) @ torch.randn(4, 50, generator=generator, dtype=dtype)
        values = torch.linalg.svdvals(polar_factor(low, method="svd").double())
        assert (values > 0.5).sum() == 4
        assert values[4] < 1e-5


def test_a_failed_factorisation_is_redone_on_a_larger_interval():
    generator = torch.Generator().manual_seed(6)
    u, v = torch.randn(1024, 1, generator=generator), torch.randn(1, 1024, generator=generator)
    got = polar_zolotarev(u @ v, poles=5, interval=1e-4)
    assert torch.linalg.norm(got).item() == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_dtype_is_kept_and_the_input_is_not_written(dtype):
    matrix = torch.randn(8, 5, generator=torch.Generator().manual_seed(7)).to(dtype)
    before = matrix.clone()
    assert polar_factor(matrix).dtype == dtype
    assert torch.equal(matrix, before)


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 4, 4), (2, 0, 3)])
def test_empty_matrices_and_batches_come_back_empty(shape):
    assert polar_factor(torch.empty(*shape)).shape == shape
    assert polar_factor(torch.empty(*shape), method="svd").shape == shape


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ({"matrix": torch.ones(3)}, ValueError, "at least two axes"),
        ({"matrix": torch.ones(2, 2).numpy()}, TypeError, "`matrix` of `polar_factor` must be a torch tensor; got ndarray"),
        ({"matrix": torch.ones(2, 2, dtype=torch.int64)}, TypeError, "real floating dtype"),
        ({"matrix": torch.ones(2, 2, dtype=torch.complex64)}, TypeError, "real floating dtype"),
        ({"matrix": torch.ones(2, 2), "method": "ns"}, ValueError, "`method`.*zolotarev.*'ns'"),
        ({"matrix": torch.ones(2, 2), "mode": "quick"}, ValueError, "`mode`.*fast.*'quick'"),
        ({"matrix": torch.ones(2, 2), "method": "zolotarev", "mode": "strict"}, ValueError, "fast or robust"),
    ],
)
def test_bad_input_is_refused_with_the_argument_and_its_value(unchecked_types, arguments, error, message):
    with pytest.raises(error, match=message):
        polar_factor(**arguments)
