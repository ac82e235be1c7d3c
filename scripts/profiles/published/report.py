"""What the profiles are made of, in tables: measured or inferred, residuals, and checks against what was left over."""

from collections.abc import Iterator

import numpy as np

from published.build import Built
from published.collectives import LARGE_BYTES, lone_source_error
from published.machines import XLA_COLLECTIVES
from tpplan.machine.fit_tables import leave_one_group_out, rms
from tpplan.machine.tables import Collective

#: from here on a left-out group's time is bandwidth across nodes too
FAR_BYTES = 256 * 1024**2
INFERRED_WIDTH = 110


def print_report(built: Built) -> None:
    """Everything about one machine."""
    print(f"== {built.profile.name}: {built.profile.device}")
    for line in (*provenance(built), *checks(built), *agreement(built), *left_out(built)):
        print(line)
    print(built.profile.group_extrapolation, *built.profile.notes, "", sep="\n")


def provenance(built: Built) -> Iterator[str]:
    """One line per table: what it is, its error, its sources, how it was inferred."""
    profile = built.profile
    yield f"  {'table':32}{'error':>16}  sources; inferred"
    parts = [("memory", "", profile.memory), ("launch", f"{profile.launch.relative_error:.2g}", profile.launch)]
    parts.append(("bandwidth", f"{profile.bandwidth.relative_error:.2g}", profile.bandwidth))
    parts += [
        (f"matmul {table.dtype}", f"{table.relative_error:.2g}, {table.extrapolation_relative_error:.2g} beyond", table)
        for table in profile.matmuls
    ]
    parts += [(f"attention {rate.dtype}", f"{rate.relative_error:.2g}", rate) for rate in profile.attention_rates]
    parts += [
        (
            f"{table.kind} {table.ranks} x {table.ranks_per_node}",
            f"{min(table.relative_error):.2g} - {max(table.relative_error):.2g}",
            table,
        )
        for table in profile.collectives
    ]
    for name, error, part in parts:
        how = part.inferred or "measured"
        shown = how if len(how) <= INFERRED_WIDTH else how[: INFERRED_WIDTH - 3] + "..."
        yield f"  {name:32}{error:>16}  {' '.join(part.sources)}; {shown}"


def checks(built: Built) -> Iterator[str]:
    """ln(predicted / measured) where somebody measured what was scaled: median and RMS by place."""
    for check in built.checks:
        yield f"  check: {check.what}: ln(predicted / measured), median, rms"
        for place, deviations in (*check.deviations.items(), ("all", np.concatenate(list(check.deviations.values())))):
            spread = f"{rms(deviations):7.3f}" if len(deviations) > 1 else ""
            yield f"    {place:45}{np.median(deviations):+7.3f}{spread}"


def agreement(built: Built) -> Iterator[str]:
    """How far the sources of each measured group are from what is stored."""
    rows = built.rows
    if not len(rows):
        return
    yield "  sources per group: median and largest |ln(source / stored)| below and from 16 MiB"
    for table in built.profile.collectives:
        same = (rows.kind == table.kind) & (rows.ranks == table.ranks) & (rows.ranks_per_node == table.ranks_per_node)
        for source, group in rows[same].groupby("source_id"):
            stored = np.array([table.time(n).seconds for n in group.n])
            signed = np.log(group.time_s.to_numpy() / stored)
            small, large = (signed[mask] for mask in (group.n < LARGE_BYTES, group.n >= LARGE_BYTES))
            shown = "  ".join(
                f"{np.median(part):+7.1%} {np.abs(part).max():6.1%}" if len(part) else " " * 15
                for part in (small, large)
            )
            yield f"    {table.kind:15}{table.ranks:3} x {table.ranks_per_node}  {source}  {shown}"
    if rows.source_id.nunique() > 1:
        for kind in Collective:
            yield f"    {XLA_COLLECTIVES} against the others, large {kind}: {lone_source_error(rows, kind):.1%}"


def left_out(built: Built) -> Iterator[str]:
    """How well each group is predicted from the others."""
    yield "  leave one group out: ln(predicted / stored), RMS, median, below and from 256 MiB"
    for table, error in leave_one_group_out(built.profile):
        large = np.array(table.bytes) >= FAR_BYTES
        small_rms = f"{rms(error[~large]):6.2f}" if (~large).any() else "      "
        yield (
            f"    {table.kind:15}{table.ranks:3} x {table.ranks_per_node}  rms {rms(error):5.2f}  median"
            f" {np.median(error):+5.2f}  small {small_rms}  large {rms(error[large]):5.2f}"
        )
