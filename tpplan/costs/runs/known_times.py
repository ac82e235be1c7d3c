"""Times of a machine's kernels and collectives, each looked up in its profile once."""

from dataclasses import dataclass, field

from tpplan.core.mesh import GroupShape
from tpplan.costs.runs.kernels import Kernel, kernel_time
from tpplan.machine.profile import Collective, Estimate, HardwareProfile


@dataclass(frozen=True, slots=True)
class KnownTimes:
    """A profile that remembers what it was asked."""

    profile: HardwareProfile
    _kernels: dict[Kernel, Estimate] = field(default_factory=dict)
    _moves: dict[float, Estimate] = field(default_factory=dict)
    _collectives: dict[tuple[Collective, GroupShape, float], Estimate] = field(default_factory=dict)

    def kernel(self, kernel: Kernel) -> Estimate:
        """Seconds of a kernel, with the time to issue it (tpplan.costs.runs.kernels.kernel_time)."""
        if kernel not in self._kernels:
            self._kernels[kernel] = kernel_time(self.profile, kernel)
        return self._kernels[kernel]

    def move(self, num_bytes: float) -> Estimate:
        """Seconds of a kernel that reads and writes so many bytes, with the time to issue it."""
        if num_bytes not in self._moves:
            self._moves[num_bytes] = self.profile.memory_bound(num_bytes=num_bytes) + self.profile.issuing
        return self._moves[num_bytes]

    def collective(self, kind: Collective, group: GroupShape, num_bytes: float) -> Estimate:
        """Seconds of a collective (tpplan.machine.profile.HardwareProfile.collective)."""
        key = kind, group, num_bytes
        if key not in self._collectives:
            self._collectives[key] = self.profile.collective(kind, group, num_bytes)
        return self._collectives[key]
