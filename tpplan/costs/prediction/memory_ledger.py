"""The live memory of a rank during a step, by part, and its peak."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from tpplan.plan.plan import Pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The most bytes at once, by part, with the pass and the module ("" is the root) that ran then."""

    memory_bytes: Mapping[str, float]
    during: Pass
    module: str

    @property
    def num_bytes(self) -> float:
        """Bytes of all parts."""
        return sum(self.memory_bytes.values())


@dataclass(slots=True)
class Piece:
    """Memory that lives while `holders`, the number of its holders, is above 0."""

    part: str
    num_bytes: float
    holders: int = 0


@dataclass(slots=True)
class Ledger:
    """Adds up the live pieces. `during` and `module` say which pass and module runs."""

    during: Pass = Pass.FORWARD
    module: str = ""
    live: Counter[str] = field(default_factory=Counter)
    live_bytes: float = 0.0
    peak: Peak | None = None
    peak_bytes: float = -1.0

    def hold(self, piece: Piece) -> Piece:
        """Adds a holder; the first one makes the piece live."""
        if not piece.holders:
            self.live[piece.part] += piece.num_bytes  # type: ignore[assignment]
            self.live_bytes += piece.num_bytes
        piece.holders += 1
        self.pass_by()
        return piece

    def drop(self, piece: Piece | None) -> None:
        """Removes a holder; with the last one the piece is freed."""
        if piece is None:
            return
        assert piece.holders > 0, f"{piece.part} was dropped before"
        piece.holders -= 1
        if not piece.holders:
            self.live[piece.part] -= piece.num_bytes  # type: ignore[assignment]
            self.live_bytes -= piece.num_bytes

    def rename(self, piece: Piece, part: str) -> None:
        """Counts a piece as another part from now on."""
        if piece.holders:
            self.live[piece.part] -= piece.num_bytes  # type: ignore[assignment]
            self.live[part] += piece.num_bytes  # type: ignore[assignment]
        piece.part = part

    def pass_by(self, part: str = "", num_bytes: float = 0.0) -> None:
        """Counts bytes of a part for a moment, beside what lives, and notes a new peak."""
        total = self.live_bytes + num_bytes
        if total > self.peak_bytes:
            self.peak_bytes = total
            self.peak = Peak(memory_bytes=self._held(part, num_bytes), during=self.during, module=self.module)

    def _held(self, part: str, num_bytes: float) -> dict[str, float]:
        """Bytes by part of what lives and of so many more of a part."""
        parts = Counter(self.live)
        parts[part] += num_bytes  # type: ignore[assignment]
        return {name: float(count) for name, count in parts.items() if count > 0}


@dataclass(slots=True)
class Course(Ledger):
    """A ledger that also notes the course of memory: while a module runs in a pass, the most bytes at once."""

    moments: list[Peak] = field(default_factory=list)

    def pass_by(self, part: str = "", num_bytes: float = 0.0) -> None:
        """Notes a new peak, and a moment that is above the others of its module."""
        Ledger.pass_by(self, part, num_bytes)
        last = self.moments[-1] if self.moments else None
        is_same = last is not None and (last.during, last.module) == (self.during, self.module)
        if last is not None and is_same and self.live_bytes + num_bytes <= last.num_bytes:
            return
        moment = Peak(memory_bytes=self._held(part, num_bytes), during=self.during, module=self.module)
        if is_same:
            self.moments.pop()
        self.moments.append(moment)
