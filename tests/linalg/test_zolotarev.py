import numpy as np
import pytest

from specgrad.linalg.zolotarev import rational_sign

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
