"""A card whose ONNX Runtime computes on the processor: what was measured on it all the same, how to get the rest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from edgeformer.backends import Target as BuildTarget
from edgeformer.backends import all_builders, how_to_use_card, on_gpu
from edgeformer.bundle import Bundle
from edgeformer.formats.device import DeviceProfile
from edgeformer.formats.report import Row
from edgeformer.stages.profiling.request import Target


def rest_of_card(bundle: Bundle, device: DeviceProfile, target: Target, rows: Sequence[Row]) -> Iterator[str]:
    """Notes for the report; none where the device is not here, is no card, or computed all that was measured.

    Args:
        bundle: that was profiled.
        device: that it was profiled for.
        target: whether that is here.
        rows: of host and device.
    """
    measured = [row for row in rows if row.where == "host" and row.latency_ms.status == "measured"]
    there = list(dict.fromkeys(row.artifact for row in measured if on_gpu(row.provider)))
    rest = list(dict.fromkeys(row.artifact for row in measured if row.artifact not in there))
    if not target.present or device.kind != "cuda" or not rest:
        return
    told = f"measured on the card itself: {', '.join(there)}" if there else "nothing was measured on the card itself"
    yield f"{told}; {', '.join(rest)} ran on the processor: {how_to_use_card()}"
    if there:
        return
    for builder in all_builders():
        planned = builder.plan(device) if builder.needs_device else None
        if isinstance(planned, BuildTarget) and not any(one.format == planned.format for one in bundle.built()):
            name = "BUNDLE" if bundle.manifest.wrapped is not None else bundle.name
            command = f"edgeformer export {name} --fp16 {builder.flag} --target {device.name}"
            yield f"engines run on the card without that ONNX Runtime, and can be built here: {command}"
            return
