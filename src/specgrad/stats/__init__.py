"""Fits of scaling laws, and checks of numbers against expectations; knows no lab."""

from specgrad.stats.check import Check, exponent_check
from specgrad.stats.power_law import LocalSlopes, PowerLaw, fit_power_law, local_slopes

__all__ = ["Check", "LocalSlopes", "PowerLaw", "exponent_check", "fit_power_law", "local_slopes"]
