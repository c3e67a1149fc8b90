import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar

from specgrad.linalg.backend import gram_of_rows
from specgrad.linalg.zolotarev import polar_zolotarev, rational_sign

# (poles, interval): scale, residues, shifts, error; computed independently from the closed formulas.
KNOWN = {
    (2, 1e-3): (1.04511, (0.005443, 0.145535), (6.407731e-6, 5.266379e-3), 0.202),
    (2, 2e-3): (0.961940, (0.00958358, 0.1926082), (1.8960818e-5, 9.18605963e-3), 0.155),
    (3, 1e-3): (0.753581, (0.003576, 0.03501, 0.383982), (2.197002e-6, 3.053346e-4, 3.559275e-2), 0.062),
    (4, 5e-4): (
        0.635584,
        (0.00154141, 0.01002519, 0.07375906, 0.57382926),
        (3.4398659e-7, 2.4875468e-5, 1.3580052e-3, 7.6471802e-2),
        0.029,
    ),
}


@pytest.mark.parametrize("key", KNOWN)
def test_coefficients_are_the_known_ones(key):
    scale, residues, shifts, error = KNOWN[key]
    got = rational_sign(*key)
    assert got.scale == pytest.approx(scale, rel=1e-5)
    assert got.residues == pytest.approx(residues, rel=2e-4)
    assert got.shifts == pytest.approx(shifts, rel=1e-6)
    assert got.error == pytest.approx(error, abs=5e-4)


@pytest.mark.parametrize("poles, interval", [(1, 0.1), (2, 2e-3), (3, 1e-3), (4, 5e-4), (6, 1e-5)])
def test_error_equioscillates_between_plus_and_minus_the_stated_error(poles, interval):
    sign = rational_sign(poles, interval)
    x = np.geomspace(interval, 1, 400_001)
    deviation = sign(x) - 1
    assert np.abs(deviation).max() == pytest.approx(sign.error, rel=1e-5)
    turning = deviation[np.flatnonzero(np.diff(np.sign(np.diff(deviation)))) + 1]
    assert len(turning) == 2 * poles
    assert np.abs(turning) == pytest.approx(sign.error, rel=1e-4)


@pytest.mark.parametrize("poles, interval", [(0, 0.1), (2, 0.0), (2, 1.0)])
def test_settings_out_of_range_are_refused(poles, interval):
    with pytest.raises(ValueError, match=r"`(poles|interval)`"):
        rational_sign(poles, interval)


@pytest.mark.parametrize("backend", ["torch", "scipy"])
@pytest.mark.parametrize("shape", [(1, 1), (65, 70), (131, 131), (257, 300), (300, 1203)])
def test_the_rational_function_is_applied_to_the_singular_values(shape, backend):
    matrix = torch.from_numpy(np.random.default_rng(0).standard_normal(shape))
    sign = rational_sign(4, 5e-4)
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    got = polar_zolotarev(matrix, poles=4, interval=5e-4, backend=backend)
    images = (u.mT @ got @ vh.mT).diagonal()
    assert torch.allclose(got, (u * images) @ vh, atol=1e-9)

    # The largest singular value is estimated, so that the function's argument is known up to one factor.
    def distance(estimate: float) -> float:
        return float(np.abs(images.numpy() - sign((s / s[0]).numpy() / estimate)).max())

    grid = np.linspace(0.9, 1.1, 201)
    best = grid[np.argmin([distance(e) for e in grid])]
    assert (
        minimize_scalar(distance, bounds=(best - 0.001, best + 0.001), method="bounded", options={"xatol": 1e-13}).fun < 1e-6
    )


@pytest.mark.parametrize("shape", [(0, 3), (191, 7), (192, 5), (193, 4), (2, 3, 250, 6)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_gram_matrix_is_the_product_with_the_transpose(shape, dtype):
    x = torch.from_numpy(np.random.default_rng(1).standard_normal(shape)).to(dtype)
    assert torch.allclose(gram_of_rows(x), x @ x.mT, rtol=1e-5, atol=1e-5 if dtype == torch.float32 else 1e-12)
