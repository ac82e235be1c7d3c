"""Computes the error bar of a step, one standard deviation, from the residuals of the profile's tables.

Errors of times from one table are fully correlated and add up linearly; tables were measured separately, so their
errors are uncorrelated and add up in quadrature [JCGM 100:2008 (GUM), 5.1.2 for uncorrelated and 5.2.2 for fully
correlated quantities]:

    error^2 = sum over tables of (sum of the errors of its times)^2

Where numbers of a profile were fitted to training runs, those runs measured its kernels and FSDP's collectives
together: the fit's residual, for whole steps, then replaces the residuals of these tables. The residual of the
tensor-parallel collectives, which hardly any of the runs had, stays.
"""

import math
from dataclasses import dataclass

from tpplan.machine.profile import HardwareProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class Residuals:
    """Errors in seconds by the table that they come from, summed linearly within each table."""

    matmuls: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    tp_collectives: float = 0.0
    data_collectives: float = 0.0
    launches: float = 0.0

    def __add__(self, other: "Residuals") -> "Residuals":
        return Residuals(
            matmuls=self.matmuls + other.matmuls,
            attention=self.attention + other.attention,
            memory=self.memory + other.memory,
            tp_collectives=self.tp_collectives + other.tp_collectives,
            data_collectives=self.data_collectives + other.data_collectives,
            launches=self.launches + other.launches,
        )

    def __mul__(self, factor: float) -> "Residuals":
        return Residuals(
            matmuls=self.matmuls * factor,
            attention=self.attention * factor,
            memory=self.memory * factor,
            tp_collectives=self.tp_collectives * factor,
            data_collectives=self.data_collectives * factor,
            launches=self.launches * factor,
        )

    def combined(self, profile: HardwareProfile, fitted_s: float) -> float:
        """Returns the step's error in seconds; fitted_s are the step's seconds in terms that fits to runs cover."""
        if profile.fitted:
            residual = max(number.residual for number in profile.fitted)
            return math.hypot(residual * fitted_s, self.tp_collectives)
        return math.hypot(
            self.matmuls, self.attention, self.memory, self.tp_collectives, self.data_collectives, self.launches
        )


NONE = Residuals()
