"""Every method and mode of `polar_factor` on the inputs that break others."""

import pytest
import torch

from specgrad.linalg import choose_method, polar_factor
from specgrad.linalg.exact import polar_svd

# (method, mode) pairs that differ; `auto` covers what a user gets by default.
CASES = [
    ("auto", "fast"),
    ("auto", "robust"),
    ("auto", "exact"),
    ("auto", "strict"),
    ("newton_schulz", "fast"),
    ("newton_schulz", "robust"),
    ("svd", "strict"),
    ("qdwh", "strict"),
]
each_case = pytest.mark.parametrize("method, mode", CASES)
EXACT = [case for case in CASES if case[1] in ("exact", "strict")]
WIDTH = 96


def rotated(singular_values, rows, cols, seed=0):
    """A float64 matrix with given singular values, and its polar factor."""
    generator = torch.Generator().manual_seed(seed)
    s = torch.as_tensor(singular_values, dtype=torch.float64)
    u, _ = torch.linalg.qr(torch.randn(rows, len(s), generator=generator, dtype=torch.float64))
    v, _ = torch.linalg.qr(torch.randn(cols, len(s), generator=generator, dtype=torch.float64))
    return (u * s) @ v.mT, (u * (s > 0)) @ v.mT


def spike(width):
    values = torch.full((width,), 3e-2, dtype=torch.float64)
    values[0] = 1
    return values


def inputs():
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    # The first draw inside every mode's interval: one direction below it costs 1/sqrt(96) = 0.1 of the norm.
    gaussian = randn(WIDTH, WIDTH)
    while torch.linalg.cond(gaussian) > 450:
        gaussian = randn(WIDTH, WIDTH)
    sparse, entry = randn(WIDTH, WIDTH), torch.zeros(WIDTH, WIDTH, dtype=torch.float64)
    entry[3, 5] = 2
    sparse[sparse.abs() < 2] = 0
    return {
        "gaussian": gaussian,
        "wide": randn(WIDTH, 4 * WIDTH),
        "condition 1e3": rotated(torch.logspace(0, -3, WIDTH), WIDTH, WIDTH)[0],
        "condition 1e5": rotated(torch.logspace(0, -5, WIDTH), WIDTH, WIDTH)[0],
        "spike": rotated(spike(WIDTH), WIDTH, WIDTH)[0],
        "low rank": randn(WIDTH, WIDTH // 4) @ randn(WIDTH // 4, WIDTH),
        "rank one": randn(WIDTH, 1) @ randn(1, WIDTH),
        "power law": rotated(1 / torch.arange(1.0, WIDTH + 1), WIDTH, WIDTH)[0],
        "ones": torch.ones(WIDTH, WIDTH, dtype=torch.float64),
        "uniform": torch.rand(WIDTH, WIDTH, generator=generator, dtype=torch.float64),
        "sparse": sparse,
        "one entry": entry,
        "identity": torch.eye(WIDTH, dtype=torch.float64),
    }  # fmt: skip


INPUTS = inputs()


def standard_inputs(width=384):
    """Six inputs of the width that the methods' errors are stated for, each with its polar factor."""
    generator = torch.Generator().manual_seed(0)
    square = torch.randn(width, width, generator=generator, dtype=torch.float64)
    while torch.linalg.cond(square) > 2000:  # one direction outside the interval costs 1/sqrt(384) = 0.05 of the norm
        square = torch.randn(width, width, generator=generator, dtype=torch.float64)
    wide = torch.randn(width, 4 * width, generator=generator, dtype=torch.float64)
    return {
        "gaussian": (square, polar_svd(square)),
        "wide": (wide, polar_svd(wide)),
        "condition 1e3": rotated(torch.logspace(0, -3, width), width, width),
        "spike": rotated(spike(width), width, width),
        "low rank": rotated([1.0] * 96 + [0.0] * (width - 96), width, width),
        "rank one": rotated([1.0] + [0.0] * (width - 1), width, width),
    }


STANDARD = standard_inputs()


@each_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_no_singular_value_is_amplified_above_1_25(method, mode, dtype):
    for name, matrix in INPUTS.items():
        scaled = (matrix / matrix.abs().max()).to(dtype)
        for one in (scaled, scaled.mT, torch.stack([scaled] * 40)[:, :32, :32].contiguous()):
            top = torch.linalg.matrix_norm(polar_factor(one, method, mode).double(), 2).max().item()
            assert top <= 1.25, name


@pytest.mark.parametrize("mode", ["fast", "robust"])
@pytest.mark.parametrize("working", [torch.bfloat16, torch.float32, torch.float64])
def test_no_working_dtype_of_the_polynomials_amplifies_above_1_25(mode, working):
    for name, matrix in INPUTS.items():
        got = polar_factor(matrix.float(), "newton_schulz", mode, dtype=working)
        assert torch.linalg.matrix_norm(got.double(), 2).item() <= 1.25, name


@each_case
def test_zero_gives_exact_zero_and_a_bad_matrix_in_a_stack_never_touches_its_neighbours(method, mode):
    stack = torch.randn(40, 6, 9, generator=torch.Generator().manual_seed(1))
    clean = polar_factor(stack, method, mode)
    stack[1] = 0
    stack[2, 3, 4] = torch.inf
    stack[3, 0, 0] = torch.nan
    stack[4] *= 1e30
    got = polar_factor(stack, method, mode)
    assert torch.equal(got[1], torch.zeros(6, 9))
    assert got[2].isnan().all()
    assert got[3].isnan().all()
    others = [0, *range(5, 40)]
    assert torch.equal(got[others], clean[others])
    torch.testing.assert_close(got[4], clean[4], atol=2e-2, rtol=0)


@each_case
@pytest.mark.parametrize("scale", [1e-36, 1e-30, 1e-20, 1e20, 1e30])
def test_the_result_does_not_depend_on_the_scale(method, mode, scale):
    matrix = torch.rand(20, 30, generator=torch.Generator().manual_seed(2)) + 0.5
    half = choose_method(matrix, method, mode).dtype == torch.bfloat16
    got, plain = polar_factor(matrix * scale, method, mode), polar_factor(matrix, method, mode)
    # Entries near 1e-36 are at the edge of float32's full precision; bfloat16 rounds once more after scaling.
    assert torch.linalg.norm(got - plain) <= (0.3 if half else 2e-3) * torch.linalg.norm(plain)


@each_case
@pytest.mark.parametrize("shape", [(24, 10), (9, 31), (40, 1), (1, 40)])
def test_transposes_agree_bit_for_bit_when_rectangular(method, mode, shape):
    matrix = torch.randn(*shape, generator=torch.Generator().manual_seed(3))
    if method in ("svd", "qdwh"):
        torch.testing.assert_close(
            polar_factor(matrix.mT, method, mode), polar_factor(matrix, method, mode).mT, atol=1e-7, rtol=0
        )
    else:
        assert torch.equal(polar_factor(matrix.mT.contiguous(), method, mode), polar_factor(matrix, method, mode).mT)


@each_case
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_dtype_is_kept_and_the_input_is_not_written(method, mode, dtype):
    matrix = torch.randn(3, 8, 5, generator=torch.Generator().manual_seed(4)).to(dtype)
    before = matrix.clone()
    got = polar_factor(matrix, method, mode)
    assert got.dtype == dtype
    assert got.shape == matrix.shape
    assert torch.equal(matrix, before)


@each_case
@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 4, 4), (2, 0, 3), (1, 1), (1, 5), (5, 1), (2, 3, 4, 4)])
def test_empty_and_degenerate_shapes_work(method, mode, shape):
    got = polar_factor(torch.ones(*shape), method, mode)
    assert got.shape == shape
    if got.numel():
        norm = torch.linalg.matrix_norm(got.double(), 2)
        assert ((norm - 1).abs() < 0.2).all()


@pytest.mark.parametrize("method, mode", EXACT)
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 2e-5), (torch.float64, 1e-9)])
def test_exact_methods_return_the_partial_isometry_on_the_numerical_range(method, mode, dtype, bound):
    for spectrum in (
        torch.logspace(0, -3, 64),
        spike(64),
        1 / torch.arange(1.0, 65),
        [1.0] * 16 + [0.0] * 48,
        [1.0] + [0.0] * 63,
    ):
        for rows, cols in ((64, 64), (64, 200), (200, 64)):
            matrix, expected = rotated(spectrum, rows, cols)
            got = polar_factor(matrix.to(dtype), method, mode).double()
            assert torch.linalg.norm(got - expected) <= bound * torch.linalg.norm(expected)


@pytest.mark.parametrize("mode, bound", [("fast", 0.16), ("robust", 0.03), ("exact", 2e-5), ("strict", 2e-6)])
@pytest.mark.parametrize("name", list(STANDARD))
def test_errors_on_the_six_standard_inputs_stay_at_the_level_of_the_mode(mode, bound, name):
    matrix, expected = STANDARD[name]
    got = polar_factor(matrix.float(), mode=mode).double()
    assert torch.linalg.norm(got - expected) <= bound * torch.linalg.norm(expected)


@pytest.mark.parametrize("mode", ["fast", "robust", "exact", "strict"])
def test_a_rank_one_512_square_leaks_at_most_1e5_of_its_energy_in_every_cpu_mode(mode):
    generator = torch.Generator().manual_seed(5)
    matrix = torch.randn(512, 1, generator=generator) @ torch.randn(1, 512, generator=generator)
    got = polar_factor(matrix, mode=mode).double()
    direction = matrix.double() / torch.linalg.norm(matrix.double())
    assert 1 - (got * direction).sum() ** 2 / got.square().sum() <= 1e-5


@pytest.mark.parametrize("backend", ["torch", "scipy"])
@pytest.mark.parametrize("mode", ["fast", "robust", "strict"])
def test_both_backends_agree_to_rounding(backend, mode):
    matrix = torch.randn(100, 150, generator=torch.Generator().manual_seed(6))
    reference = polar_factor(matrix.double(), mode=mode, backend=backend)
    torch.testing.assert_close(polar_factor(matrix, mode=mode, backend=backend).double(), reference, atol=2e-4, rtol=0)


@pytest.mark.parametrize("method, mode", [("auto", "exact"), ("auto", "strict"), ("newton_schulz", "robust")])
def test_a_users_autocast_does_not_round_the_products(method, mode):
    matrix = torch.randn(40, 60, generator=torch.Generator().manual_seed(7))
    expected = polar_factor(matrix, method, mode)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(polar_factor(matrix, method, mode), expected)


def test_the_choice_can_be_asked_and_follows_accuracy_and_shape():
    assert choose_method(torch.zeros(384, 384)).method == "zolotarev"
    assert choose_method(torch.zeros(400, 32, 32)).method == "newton_schulz"
    assert choose_method(torch.zeros(400, 32, 32, dtype=torch.float64)).method == "zolotarev"
    assert choose_method(torch.zeros(3, 3), mode="exact").method == "eigh"
    assert choose_method(torch.zeros(3, 3), "svd").dtype == torch.float64
    assert choose_method(torch.zeros(3, 3, dtype=torch.bfloat16)).dtype == torch.float32


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"method": "newton_schulz", "mode": "exact"}, "fast or robust with method 'newton_schulz'; got 'exact'"),
        ({"dtype": torch.int8}, "`dtype` of `polar_factor`.*torch.int8"),
        ({"method": "zolotarev", "dtype": torch.bfloat16}, "float32 or float64 with method 'zolotarev'"),
        ({"backend": "mkl"}, "`backend` must be one of auto, torch, scipy; got 'mkl'"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings, message, unchecked_types):
    with pytest.raises(ValueError, match=message):
        polar_factor(torch.ones(2, 2), **settings)
