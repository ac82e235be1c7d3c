"""Seconds that FSDP2's communication adds to a step: collectives that compute does not hide, and copies.

FSDP prefetches: a unit's gather hides behind its neighbour's compute, so that max(0, communication - compute) of a unit
is exposed; all of the root's is, for nothing runs before or after it. A device without streams hides nothing: on a CPU
each collective is waited for where it is issued.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tpplan.core.mesh import Axis, Mesh
from tpplan.costs.step.cost_table import PricedSpace
from tpplan.costs.step.layer_groups import LayerGroups
from tpplan.costs.step.parameter_bytes import BytesOf, ParameterBytes
from tpplan.costs.step.train_config import Setting
from tpplan.layouts.layer_treatments import Count, FsdpUnit, Treatment
from tpplan.machine.profile import Collective
from tpplan.plan.parts import DATA_PARALLEL, FSDP_COPIES
from tpplan.plan.plan import Precision, Recompute
from tpplan.solvers.problem import Expression, Term, added, merged, negative, scaled


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlappedCollective:
    """Seconds of a collective and, with the other sign, of the compute beside it, None where nothing runs beside it;
    both happen `weight` times a step for each of `count` units."""

    transfer: Expression
    uncomputed: Expression | None
    weight: float
    count: Count

    @property
    def compute(self) -> Expression | None:
        """Seconds of the compute beside it; None where nothing runs beside it."""
        return None if self.uncomputed is None else negative(self.uncomputed)

    def terms(self, slowdown: float) -> Iterator[Term]:
        """The seconds that the collective adds to a step.

        All of T where nothing runs beside it; else what the compute C does not hide, plus what it hides times the
        slowdown s of the compute: max(0, T - C) + s min(T, C) = (1 - s) max(0, T - C) + s T.
        """
        issued = Term(name=DATA_PARALLEL, expressions=(self.transfer,), weight=self.weight)
        if self.uncomputed is None:
            yield from self.count.times(issued)
            return
        exposed = (Expression(), added(self.transfer, self.uncomputed))
        yield from self.count.times(replace(issued, expressions=exposed, weight=self.weight * (1 - slowdown)))
        if slowdown:
            yield from self.count.times(replace(issued, weight=self.weight * slowdown))


@dataclass(frozen=True, slots=True, kw_only=True)
class FsdpCommunication:
    """FSDP's collectives and copies on a mesh."""

    priced: PricedSpace
    mesh: Mesh
    setting: Setting
    groups: LayerGroups
    parameter_bytes: ParameterBytes

    def terms(self) -> Iterator[Term]:
        """Seconds of exposed collectives, where there are several data-parallel ranks, and of copies, with FSDP."""
        if self.mesh.data_parallel > 1:
            for overlapped in self.collectives():
                yield from overlapped.terms(self.setting.profile.overlap_slowdown)
        if self.groups.uses_fsdp:
            yield from self._copies()

    def collectives(self) -> Iterator[OverlappedCollective]:
        """FSDP's collectives, each with the compute that it runs beside; nothing runs beside the root's. Gradients are
        reduced in each micro-batch, or in the last alone."""
        steps, reductions = float(self.setting.accumulation_steps), float(self.setting.reductions)
        gathers = float(self.setting.gathers)
        for unit in self.groups.root:
            gather, scatter, reduce = self.collectives_of(unit)
            once = Count(constant=1)
            if reductions == gathers == steps:
                yield OverlappedCollective(transfer=added(gather, scatter), uncomputed=None, weight=steps, count=once)
            else:
                yield OverlappedCollective(transfer=gather, uncomputed=None, weight=gathers, count=once)
                yield OverlappedCollective(transfer=scatter, uncomputed=None, weight=reductions, count=once)
            yield OverlappedCollective(transfer=reduce, uncomputed=None, weight=1.0, count=once)
        for kind in self.groups.timed:
            gather, scatter, reduce = self.collectives_of(kind.unit)
            beside = self._uncomputed_in_forward(kind.unit)
            if gathers == steps and kind.unit.calls == 1:
                yield OverlappedCollective(transfer=gather, uncomputed=beside, weight=steps, count=kind.count())
            else:
                for reshard, weight in ((True, steps), (False, gathers)):
                    sent = self.sent_in_forward(kind.unit, gather, reshards=reshard)
                    count = kind.count(reshard=reshard)
                    yield OverlappedCollective(transfer=sent, uncomputed=beside, weight=weight, count=count)
            for treatment, count in kind.numbers.counts.items():
                last = self._in_last_backward(kind.unit, treatment, count)
                earlier = self.sent_in_backward(kind.unit, gather, scatter, reshards=treatment.reshard, is_last=False)
                if steps > 1 and earlier is not None:
                    yield replace(last, transfer=earlier, weight=steps - 1)
                yield last

    def in_last_backward(self) -> Iterator[tuple[FsdpUnit, OverlappedCollective]]:
        """Yields what like units, but the root, gather and reduce in the last backward of a step, with the first of
        them."""
        for kind in self.groups.timed if self.mesh.data_parallel > 1 else ():
            for treatment, count in kind.numbers.counts.items():
                yield kind.unit, self._in_last_backward(kind.unit, treatment, count)

    def _in_last_backward(self, unit: FsdpUnit, treatment: Treatment, count: Count) -> OverlappedCollective:
        gather, scatter, reduce = self.collectives_of(unit)
        repeated = self.sent_in_backward(unit, gather, scatter, reshards=treatment.reshard, is_last=True)
        assert repeated is not None
        beside = self._uncomputed_in_backward(unit, treatment.recompute)
        return OverlappedCollective(transfer=added(repeated, reduce), uncomputed=beside, weight=1.0, count=count)

    def sent_in_forward(self, unit: FsdpUnit, gather: Expression, *, reshards: bool) -> Expression:
        """Seconds of what a unit's forward gathers in a micro-batch: at each of its calls where it is resharded."""
        return scaled(gather, float(unit.calls)) if reshards and unit.calls > 1 else gather

    def sent_in_backward(
        self, unit: FsdpUnit, gather: Expression, scatter: Expression, *, reshards: bool, is_last: bool
    ) -> Expression | None:
        """Seconds of what a unit's backward gathers and scatters in a micro-batch: the gather again where the unit was
        resharded, the scatter where gradients are reduced; None where it does neither."""
        reduces = is_last or not self.setting.whole_gradients
        is_kept = self.setting.gathered_once and not is_last
        again = unit.gathers_in_backward(reshards=reshards, is_kept=is_kept) if unit.name else 0
        gathers = [gather if again == 1 else scaled(gather, float(again))] if again else []
        parts = [*gathers, *([scatter] if reduces else [])]
        return added(*parts) if parts else None

    def collectives_of(self, unit: FsdpUnit) -> tuple[Expression, Expression, Expression]:
        """Seconds of a unit's gather, of its reduce-scatter, and of the all-reduce among replicas."""
        gathered, reduced = self.parameter_bytes.computed, self.parameter_bytes.gradients
        gathers, scatters, reductions = [], [], []
        for ep in unit.divisions or (1,):
            axis, ranks = Axis.SHARD if ep == 1 else Axis.EXPERT_SHARD, self.mesh.shard // ep
            gathers.append(self._transfer(unit, ep, Collective.ALL_GATHER, axis, (1.0, gathered)))
            scatters.append(self._transfer(unit, ep, Collective.REDUCE_SCATTER, axis, (1.0, reduced)))
            reductions.append(self._transfer(unit, ep, Collective.ALL_REDUCE, Axis.REPLICATE, (1 / ranks, reduced)))
        if self.groups.over_tp.may_be(unit.name):
            wide, ranks, narrow = Axis.SHARD_TP, self.mesh.size(Axis.SHARD_TP), self.mesh.shard
            shares = ((Axis.SHARD, 1.0), (wide, 1.0))
            gathers.append(self._instead(unit, Collective.ALL_GATHER, shares, gathered))
            scatters.append(self._instead(unit, Collective.REDUCE_SCATTER, shares, reduced))
            shares = ((Axis.REPLICATE, 1 / narrow), (Axis.REPLICATE, 1 / ranks))
            reductions.append(self._instead(unit, Collective.ALL_REDUCE, shares, reduced))
        return added(*gathers), added(*scatters), added(*reductions)

    def _transfer(
        self, unit: FsdpUnit, ep: int, kind: Collective, axis: Axis, share: tuple[float, BytesOf]
    ) -> Expression:
        """Seconds of a collective over those of a unit's parameters whose experts `ep` ranks divide, linear in their
        bytes between all and none sharded by tp.

        T(x) = T(n/t) + (T(n) - T(n/t)) (x - n/t) / (n - n/t): exact at both ends.
        """
        group = self.mesh.group(axis, self.setting.gpus_per_node)
        own = self.parameter_bytes
        whole = share[0] * own.whole(unit, share[1], ep)
        least = whole / self.mesh.tp
        profile = self.setting.profile
        low = profile.collective(kind, group, least).seconds
        if self.mesh.tp == 1 or not whole:
            return Expression(constant=low)
        slope = (profile.collective(kind, group, whole).seconds - low) / (whole - least)
        local = own.of(unit, share, ep=ep)
        return added(scaled(local, slope), Expression(constant=low - slope * least))

    def _instead(
        self, unit: FsdpUnit, kind: Collective, shares: tuple[tuple[Axis, float], ...], bytes_of: BytesOf
    ) -> Expression:
        """Seconds by which a collective takes longer where the unit is over shard and tp. `shares` are its axis and the
        share of the unit's bytes without and with that; the unit's parameters are whole on tp."""
        own, tp = self.parameter_bytes, self.mesh.tp
        whole = own.whole(unit, bytes_of, 1), own.over_tp(unit, bytes_of, tp)
        narrow_s, wide_s = (
            self.setting.profile.collective(
                kind, self.mesh.group(axis, self.setting.gpus_per_node), share * num_bytes
            ).seconds
            for (axis, share), num_bytes in zip(shares, whole, strict=True)
        )
        return self.groups.over_tp.times(unit.name, wide_s - narrow_s)

    @property
    def hides(self) -> bool:
        """True where collectives run beside kernels: on streams, which a CPU does not have."""
        return self.setting.profile.device_type != "cpu"

    def hiding_compute(self, unit: FsdpUnit) -> tuple[Expression, Expression]:
        """Seconds of a unit's kernels in forward and in backward. Collectives of the tp axis hide nothing: both use the
        same links."""
        if not self.hides:
            return Expression(), Expression()
        return self.priced.once(("hidden", self.setting.units, unit.name), lambda: self._compute_of(unit))

    def _uncomputed_in_forward(self, unit: FsdpUnit) -> Expression:
        """Seconds of a unit's kernels in forward, with the other sign."""
        if not self.hides:
            return Expression()
        key = "not hidden in forward", self.setting.units, unit.name
        return self.priced.once(key, lambda: negative(self.hiding_compute(unit)[0]))

    def _uncomputed_in_backward(self, unit: FsdpUnit, mode: Recompute) -> Expression:
        """Seconds of a unit's kernels in backward, with those that run again, with the other sign."""
        if not self.hides:
            return Expression()
        _, backward = self.hiding_compute(unit)
        again, _, _ = self.priced.recomputed_forward(self.setting.units, unit.name, mode)
        key = "not hidden in backward", self.setting.units, unit.name, mode
        return self.priced.once(key, lambda: negative(merged(added(backward, again))))

    def _compute_of(self, unit: FsdpUnit) -> tuple[Expression, Expression]:
        counts, times = Counter(unit.hides), self.priced.times
        forward = tuple((name, tuple(n * t.forward.seconds for t in times[name])) for name, n in counts.items())
        backward = tuple((name, tuple(n * t.backward.seconds for t in times[name])) for name, n in counts.items())
        return Expression(terms=forward), Expression(terms=backward)

    def copies_of(self, unit: FsdpUnit) -> tuple[Expression, Expression]:
        """Seconds of copies of one gather of a unit and of one reduction (_copied)."""
        own, rate = self.parameter_bytes, self.setting.seconds_per_moved_byte
        found: tuple[list[Expression], list[Expression]] = ([], [])
        for ep in unit.divisions or (1,):
            for expressions, shares in zip(found, self._copied(self.mesh.shard // ep), strict=True):
                expressions.append(scaled(own.of(unit, *shares, ep=ep), rate))
        gathered, reduced = self._copied_more(unit)
        found[0].append(scaled(gathered, rate))
        found[1].append(scaled(added(reduced, self._multiplied(unit)), rate))
        return added(*found[0]), added(*found[1])

    def _copied(self, ranks: int) -> tuple[tuple[tuple[float, BytesOf], ...], tuple[tuple[float, BytesOf], ...]]:
        """FSDP2 gathers and reduces in flat buffers, into which and out of which it copies, one rank's shard too.

        A gather among `ranks` ranks: in from a rank's own shard, which it casts, and out. A reduction: in from a unit's
        gradients; a single rank's are copied where several's are scattered.
        [torch 2.13, fsdp/_fully_shard/_fsdp_collectives.py]
        """
        is_alone, own = ranks == 1, self.parameter_bytes
        copies_in = 0.0 if is_alone and self.setting.precision is not Precision.BF16_MIXED else 1 / ranks
        gathered = ((2.0 + copies_in, own.computed), (copies_in, own.resting))
        return gathered, ((1.0, own.trained), (3.0 if is_alone else 1.0, own.gradients))

    def _copied_more(self, unit: FsdpUnit) -> tuple[Expression, Expression]:
        """Bytes that a gather and a reduction copy more where the unit is over shard and tp, whose parameters are whole
        on tp."""
        over_tp, own, tp = self.groups.over_tp, self.parameter_bytes, self.mesh.tp
        if not over_tp.may_be(unit.name):
            return Expression(), Expression()
        narrow, wide = self._copied(self.mesh.shard), self._copied(self.mesh.size(Axis.SHARD_TP))
        more = (
            sum(share * own.over_tp(unit, bytes_of, tp) for share, bytes_of in after)
            - sum(share * own.whole(unit, bytes_of, 1) for share, bytes_of in before)
            for before, after in zip(narrow, wide, strict=True)
        )
        gathered, reduced = (over_tp.times(unit.name, num_bytes) for num_bytes in more)
        return gathered, reduced

    def _multiplied(self, unit: FsdpUnit) -> Expression:
        """At most the bytes that a backward of a unit over shard and tp moves to multiply summands of gradients."""
        over_tp, own = self.groups.over_tp, self.parameter_bytes
        if not over_tp.may_be(unit.name):
            return Expression()
        return over_tp.times(unit.name, 2.0 * own.whole(unit, own.trained, 1))

    def _copies(self) -> Iterator[Term]:
        rate, own, timed = self.setting.seconds_per_moved_byte, self.parameter_bytes, self.groups.timed
        steps, reductions, gathers = self.setting.accumulation_steps, self.setting.reductions, self.setting.gathers
        every = [(unit, Count(constant=1), gathers) for unit in self.groups.root]
        if gathers == steps:
            every += [(kind.unit, kind.count(), steps) for kind in timed]
        else:
            every += [(kind.unit, kind.count(reshard=False), gathers) for kind in timed]
            every += [(kind.unit, kind.count(reshard=True), steps) for kind in timed]
        again = [(kind.unit, kind.count(reshard=True), steps) for kind in timed]
        for kind in (kind for kind in timed if kind.unit.calls > 1):
            further = kind.unit.calls - 1
            again += [(kind.unit, kind.count(reshard=True), 2 * further * steps)]
            again += [(kind.unit, kind.count(reshard=False), further * gathers)]
        for units, is_again in ((every, False), (again, True)):
            for unit, count, times in units:
                if self.groups.over_tp.may_be(unit.name):
                    moved = self._copied_either_way(unit, times, is_again=is_again)
                    yield from count.times(Term(name=FSDP_COPIES, expressions=(moved,), weight=rate))
                    continue
                for ep in unit.divisions or (1,):
                    gathered, reduced = self._copied(self.mesh.shard // ep)
                    both = not is_again and reductions == times
                    expression = own.of(unit, *((*gathered, *reduced) if both else gathered), ep=ep)
                    yield from count.times(Term(name=FSDP_COPIES, expressions=(expression,), weight=rate * times))
                    if not (is_again or both):
                        expression = own.of(unit, *reduced, ep=ep)
                        term = Term(name=FSDP_COPIES, expressions=(expression,), weight=rate * reductions)
                        yield from count.times(term)

    def _copied_either_way(self, unit: FsdpUnit, gathers: int, *, is_again: bool) -> Expression:
        """Bytes that some gathers of a step, and where not `is_again` reductions, move for a unit that may be over
        shard and tp. One expression, as each of its values is a number of bytes moved, and none is below 0: what
        changes where the unit is over shard and tp may be."""
        steps, reductions = float(self.setting.accumulation_steps), float(self.setting.reductions)
        narrow, more = self._copied(self.mesh.shard), self._copied_more(unit)
        parts = [scaled(added(self.parameter_bytes.of(unit, *narrow[0]), more[0]), float(gathers))]
        if not is_again:
            parts.append(scaled(added(self.parameter_bytes.of(unit, *narrow[1]), more[1]), reductions))
            parts.append(scaled(self._multiplied(unit), steps))
        return merged(added(*parts))
