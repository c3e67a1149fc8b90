r"""Power laws $y = a x^b$ from runs over several seeds, with unreached values kept as what they are."""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int8
from scipy import special

Vector = Float[np.ndarray, " n"]
Values = Sequence[float | int] | np.ndarray
Flags = Sequence[bool] | np.ndarray
# 0 for a value that was reached, 1 for one known to lie above what is given, -1 for one below it.
Limits = Int8[np.ndarray, " n"]

# Each point's variance over seeds is pooled with that of the others as if this many degrees of freedom stood behind the
# common value: with three or four seeds a point's own variance is off by a factor of a few.
_PRIOR_FREEDOM = 4.0


@dataclass(frozen=True)
class PowerLaw:
    """A fitted power law ``y = amplitude * x ** exponent``.

    Attributes:
        exponent: slope in logarithms.
        low, high: confidence interval of the exponent from bootstrap over seeds; NaN with fewer than two seeds.
        amplitude: value at ``x = 1``.
        scatter: standard deviation of ``log y`` around the line.
        window: smallest and largest x used.
        num_values: values used, censored ones included.
        num_censored: values known only to lie above (or below) a bound.
        num_outside: values outside the window.
        confidence: level of the interval.
        local: slopes between neighbouring x of the window, see `local_slopes`.
    """

    exponent: float
    low: float
    high: float
    amplitude: float
    scatter: float
    window: tuple[float, float]
    num_values: int
    num_censored: int
    num_outside: int
    confidence: float
    local: tuple[float, ...]

    def __call__(self, x: float | Values) -> Float[np.ndarray, "..."]:
        """The law's value at ``x``."""
        return np.asarray(self.amplitude * np.asarray(x, dtype=float) ** self.exponent)

    def __str__(self) -> str:
        interval = "" if math.isnan(self.low) else f" [{self.low:.3f}, {self.high:.3f}]"
        censored = f", {self.num_censored} of {self.num_values} unreached" if self.num_censored else ""
        return f"{self.exponent:.3f}{interval}{censored}"


def fit_power_law(
    x: Values,
    y: Values,
    seeds: Sequence[int] | np.ndarray | None = None,
    *,
    window: tuple[float | int, float | int] | None = None,
    stderr: Values | None = None,
    censored: Flags | None = None,
    below: Flags | None = None,
    confidence: float = 0.95,
    resamples: int = 400,
    seed: int = 0,
) -> PowerLaw:
    r"""Fits $\log y = \log a + b \log x$ by weighted maximum likelihood.

    Without censored values this is weighted least squares in logarithms. A censored value, such as a time at which the
    target was not yet reached, enters as $P(Y > y)$ under normal errors of $\log Y$ (a Tobit model), never as a number.

    Args:
        x: positive abscissae, one per value.
        y: values; for a censored one the bound, such as the horizon of the run.
        seeds: seed of each value. Whole seeds are drawn again for the interval, since values of one seed belong together.
            None takes all values for independent, and draws their residuals again (where some are bounds, the values).
        window: smallest and largest x to use; None uses all and is recorded as such.
        stderr: standard error of each value, which weighs it by the inverse square of its relative error. Default: by the
            standard deviation of ``log y`` over seeds at equal x, drawn towards the mean variance; equal where there are no
            repetitions.
        censored: True where ``y`` is only a lower bound.
        below: True where ``y`` is only an upper bound, as 1 is for a count of zero.
        confidence: level of the interval.
        resamples: bootstrap draws.
        seed: seed of the bootstrap.

    Returns:
        The fit with its interval.

    Raises:
        ValueError: for lengths that differ, values that are not positive or finite, or fewer than two different x with an
            uncensored value inside the window.

    Example:
        >>> fit = fit_power_law([1, 2, 4, 8], [3.0, 12.0, 48.0, 192.0])
        >>> print(f"{fit.exponent:.3f} {fit.amplitude:.3f}")
        2.000 3.000
    """
    xs, ys, limits = _checked(x, y, censored, below)
    groups = np.arange(len(xs)) if seeds is None else np.asarray(seeds)
    sigmas = None if stderr is None else np.asarray(stderr, dtype=float)
    for name, values in (("seeds", groups), ("stderr", sigmas)):
        if values is not None and len(values) != len(xs):
            raise ValueError(f"`{name}` of `fit_power_law` must have one entry per value ({len(xs)}); got {len(values)}.")
    if not 0 < confidence < 1:
        raise ValueError(f"`confidence` of `fit_power_law` must lie between 0 and 1; got {confidence}.")
    low, high = window or (float(xs.min()), float(xs.max()))
    window = (float(low), float(high))
    inside = (xs >= low) & (xs <= high)
    if len(np.unique(xs[inside & (limits == 0)])) < 2:
        raise ValueError(
            f"`x` of `fit_power_law` must have at least two different values with reached `y` in the window "
            f"[{low:g}, {high:g}]; got {sorted(set(xs[inside & (limits == 0)].tolist()))}."
        )
    logs_x, logs_y, limits, groups = np.log(xs[inside]), np.log(ys[inside]), limits[inside], groups[inside]
    weights = _weights(logs_x, logs_y, limits, None if sigmas is None else sigmas[inside] / ys[inside])
    slope, intercept, scatter = _fit(logs_x, logs_y, limits, weights)
    down, up = _bootstrap(logs_x, logs_y, limits, weights, groups, confidence, resamples, seed, seeds is not None)
    return PowerLaw(
        slope, slope - down, slope + up, math.exp(intercept), scatter, window, int(inside.sum()),
        int(np.count_nonzero(limits)), int((~inside).sum()), confidence, _between(logs_x, logs_y, limits)[0],
    )  # fmt: skip


def _checked(x: object, y: object, censored: object, below: object = None) -> tuple[Vector, Vector, Limits]:
    xs, ys = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    above, under = (np.zeros(ys.shape, dtype=bool) if f is None else np.asarray(f, dtype=bool) for f in (censored, below))
    if xs.ndim != 1 or not xs.shape == ys.shape == above.shape == under.shape:
        raise ValueError(
            f"`x`, `y`, `censored` and `below` of `fit_power_law` must be as long as each other; got shapes {xs.shape}, "
            f"{ys.shape}, {above.shape}, {under.shape}."
        )
    limits = above.astype(np.int8) - under.astype(np.int8)
    for name, values in (("x", xs), ("y", ys)):
        bad = ~(np.isfinite(values) & (values > 0))
        if bad.any():
            raise ValueError(
                f"`{name}` of `fit_power_law` must be finite and > 0 (mark an unreached value as censored, with its bound); "
                f"got {values[bad][0]} at position {int(np.flatnonzero(bad)[0])}."
            )
    return xs, ys, limits


def _weights(logs_x: Vector, logs_y: Vector, limits: Limits, relative: Vector | None) -> Vector:
    """Inverse variances of the logarithms, with mean 1."""
    if relative is not None:
        if not (np.isfinite(relative) & (relative > 0)).all():
            raise ValueError("`stderr` of `fit_power_law` must be finite and > 0.")
        variances = relative**2
    else:
        variances = np.ones_like(logs_y)
        points = [(logs_x == value) & (limits == 0) for value in np.unique(logs_x)]
        freedoms = np.array([max(0, int(p.sum()) - 1) for p in points], dtype=float)
        own = np.array([logs_y[p].var(ddof=1) if p.sum() > 1 else 0.0 for p in points])
        pooled = (freedoms * own).sum() / freedoms.sum() if freedoms.sum() else 0.0
        if pooled > 0:
            shrunk = (freedoms * own + _PRIOR_FREEDOM * pooled) / (freedoms + _PRIOR_FREEDOM)
            for value, variance in zip(np.unique(logs_x), shrunk, strict=True):
                variances[logs_x == value] = variance
    weights: Vector = 1 / variances / np.mean(1 / variances)
    return weights


def _fit(logs_x: Vector, logs_y: Vector, limits: Limits, weights: Vector) -> tuple[float, float, float]:
    """Slope, intercept and scatter; the scatter is that of a value of mean weight."""
    seen = limits == 0
    slope, intercept, scatter = _least_squares(logs_x[seen], logs_y[seen], weights[seen])
    if seen.all():
        return slope, intercept, scatter
    from scipy import optimize  # half a second that most users of this package do without

    roots = np.sqrt(weights)

    def negative_log_likelihood(parameters: np.ndarray) -> float:
        slope, intercept, log_scatter = parameters
        scaled = (logs_y - intercept - slope * logs_x) * roots / math.exp(log_scatter)
        beyond = -(limits * scaled)[~seen]
        return float(0.5 * (scaled[seen] ** 2).sum() + seen.sum() * log_scatter - special.log_ndtr(beyond).sum())

    # The scatter of few values around their own line is too small a start for a search; exactly fitted values have none.
    floor = 1e-3
    start = np.array([slope, intercept, math.log(max(scatter, floor))])
    bounds = [(None, None), (None, None), (math.log(floor), None)]
    found = optimize.minimize(negative_log_likelihood, start, method="L-BFGS-B", bounds=bounds)
    return float(found.x[0]), float(found.x[1]), float(math.exp(found.x[2]))


def _least_squares(x: Vector, y: Vector, weights: Vector) -> tuple[float, float, float]:
    centre_x, centre_y = np.average(x, weights=weights), np.average(y, weights=weights)
    slope = float((weights * (x - centre_x) * (y - centre_y)).sum() / (weights * (x - centre_x) ** 2).sum())
    intercept = float(centre_y - slope * centre_x)
    residuals = y - intercept - slope * x
    return slope, intercept, float(np.sqrt((weights * residuals**2).sum() / max(1, len(x) - 2)))


def _resampled(
    logs_x: Vector, logs_y: Vector, limits: Limits, weights: Vector, groups: np.ndarray, draws: int, seed: int
) -> list[float]:
    """Slopes of fits to groups drawn again; draws with a single x are left out."""
    members = [np.flatnonzero(groups == name) for name in np.unique(groups)]
    generator = np.random.default_rng(seed)
    slopes = []
    for _ in range(draws):
        drawn = np.concatenate([members[i] for i in generator.integers(len(members), size=len(members))])
        if len(np.unique(logs_x[drawn][limits[drawn] == 0])) >= 2:
            slopes.append(_fit(logs_x[drawn], logs_y[drawn], limits[drawn], weights[drawn])[0])
    return slopes


def _residuals_resampled(logs_x: Vector, logs_y: Vector, weights: Vector, draws: int, seed: int) -> list[float]:
    """Slopes of fits to the fitted line with residuals drawn again, each x as often as it was measured."""
    slope, intercept, _ = _least_squares(logs_x, logs_y, weights)
    line, roots = intercept + slope * logs_x, np.sqrt(weights)
    residuals = roots * (logs_y - line)
    drawn = np.random.default_rng(seed).choice(residuals - residuals.mean(), size=(draws, len(logs_x))) / roots
    return [_least_squares(logs_x, line + noise, weights)[0] for noise in drawn]


def _bootstrap(
    logs_x: Vector, logs_y: Vector, limits: Limits, weights: Vector, groups: np.ndarray,
    confidence: float, resamples: int, seed: int, by_seed: bool,
) -> tuple[float, float]:  # fmt: skip
    """Distances from the slope to the ends of its percentile interval; NaN where there is nothing to draw again."""
    n, freedom = len(np.unique(groups)), len(np.unique(groups)) - 1
    if n < (2 if by_seed else 3):
        return math.nan, math.nan
    if by_seed or np.any(limits):
        slopes = _resampled(logs_x, logs_y, limits, weights, groups, resamples, seed)
    else:
        slopes, freedom = _residuals_resampled(logs_x, logs_y, weights, resamples, seed), n - 2
    if len(slopes) < resamples // 2:
        warnings.warn("too few values for an interval of the exponent: most resamples have a single x", stacklevel=3)
        return math.nan, math.nan
    # From n draws the percentile interval is too narrow by about sqrt(freedom/n), and by the t quantile.
    stretch = math.sqrt(n / freedom) * float(
        special.stdtrit(freedom, 0.5 + confidence / 2) / special.ndtri(0.5 + confidence / 2)
    )
    low, middle, high = np.quantile(slopes, [0.5 - confidence / 2, 0.5, 0.5 + confidence / 2])
    return float(stretch * (middle - low)), float(stretch * (high - middle))


@dataclass(frozen=True)
class LocalSlopes:
    """Slopes in logarithms between neighbouring x.

    Attributes:
        x: geometric means of the neighbours.
        slopes: slope of the means of ``log y``; NaN next to a point with an unreached value.
        stderr: standard errors, from the spread over repetitions; NaN with one repetition.
    """

    x: Float[np.ndarray, " k"]
    slopes: Float[np.ndarray, " k"]
    stderr: Float[np.ndarray, " k"]


def local_slopes(
    x: Values,
    y: Values,
    censored: Flags | None = None,
) -> LocalSlopes:
    """Slopes between neighbouring x, which show whether there is a power law at all, and where it begins.

    Args:
        x: positive abscissae, one per value; equal ones are repetitions.
        y: positive values; for a censored one its bound.
        censored: True where ``y`` is only a bound.

    Raises:
        ValueError: as `fit_power_law`, or with fewer than two different x.
    """
    xs, ys, limits = _checked(x, y, censored)
    places = np.unique(xs)
    if len(places) < 2:
        raise ValueError(f"`x` of `local_slopes` must have at least two different values; got {places.tolist()}.")
    slopes, stderr = _between(np.log(xs), np.log(ys), limits)
    return LocalSlopes(np.sqrt(places[1:] * places[:-1]), np.array(slopes), np.array(stderr))


def _between(logs_x: Vector, logs_y: Vector, limits: Limits) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Slopes between neighbouring abscissae of the mean logarithms, and their standard errors."""
    places = np.unique(logs_x)
    means, variances = np.full((2, len(places)), np.nan)
    for i, place in enumerate(places):
        here = logs_x == place
        if not np.any(limits[here]):
            means[i] = logs_y[here].mean()
            variances[i] = logs_y[here].var(ddof=1) / here.sum() if here.sum() > 1 else np.nan
    widths = np.diff(places)
    return tuple((np.diff(means) / widths).tolist()), tuple((np.sqrt(variances[1:] + variances[:-1]) / widths).tolist())
