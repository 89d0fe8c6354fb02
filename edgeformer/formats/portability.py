"""What could make an ONNX artifact run otherwise elsewhere than where it was checked, as bundle.json has it."""

from __future__ import annotations

from pydantic import Field

from edgeformer.formats.base import Frozen

# Each release of ONNX Runtime reads all earlier opsets and formats; these are the first ones of each.
_FIRST_OPSET = {17: "1.12", 18: "1.14", 19: "1.15", 20: "1.17", 21: "1.18", 22: "1.21"}
_FIRST_FORMAT = {8: "1.10", 9: "1.16", 10: "1.18"}
_FIRST_OPERATOR = {"com.microsoft:MatMulNBits": "1.17", "com.microsoft:GatherBlockQuantized": "1.20"}
_MANY = 1e-4
"""Share of denormal numbers that is worth a word."""


class Denormals(Frozen):
    """Numbers below 1.2e-38, which many processors compute 10 to 100 times slower with."""

    weights: int = Field(description="stored FP32 numbers that are denormal")
    of_weights: int = Field(description="stored FP32 numbers")
    activations: int | None = Field(None, description="on some golden inputs, of up to 64 values; None: not looked at")
    of_activations: int | None = None


class Saturation(Frozen):
    """Sums of two products u8×s8, which x86 processors with AVX2 and without VNNI cut off at 16 bits."""

    pairs: int = Field(description="neighbouring weights of one sum, in all products of u8 with s8")
    at_risk: int = Field(description="predicted: of these, pairs that some activations take beyond 16 bits")
    sums: int | None = Field(None, description="measured: sums of pairs at risk on golden inputs; None: none are")
    saturated: int | None = Field(None, description="of these, sums that really are beyond")


class Portability(Frozen):
    """The facts, of all graphs of an artifact together."""

    opset: int = Field(description="highest of the standard operators")
    ir_version: int = Field(description="of the file format")
    other_operators: dict[str, int] = Field({}, description="operators that are not of the ONNX standard → nodes")
    control_flow: dict[str, int] = Field({}, description="Loop, If, Scan → nodes: runtimes differ most in these")
    dynamic: dict[str, tuple[str, ...]] = Field({}, description="input → axes of any size")
    fixed: tuple[str, ...] = Field((), strict=False, description="inputs of one size only")
    denormals: Denormals
    saturation: Saturation | None = Field(None, description="None: it has no such products")

    @property
    def needs(self) -> str | None:
        """The oldest ONNX Runtime that reads it; None: it is older or newer than what is known here."""
        if self.opset not in _FIRST_OPSET or self.ir_version not in _FIRST_FORMAT:
            return None
        own = [_FIRST_OPERATOR[name] for name in self.other_operators if name in _FIRST_OPERATOR]
        return max(_FIRST_OPSET[self.opset], _FIRST_FORMAT[self.ir_version], *own, key=release)

    def notes(self) -> list[str]:
        """What its owner should know before shipping it; nothing of what is as usual."""
        found, tiny = [], self.denormals
        if tiny.weights > _MANY * max(1, tiny.of_weights):
            found.append(f"{tiny.weights:,} of {tiny.of_weights:,} FP32 weights are denormal; {_FLUSH}")
        if tiny.activations is not None and tiny.activations > _MANY * max(1, tiny.of_activations or 0):
            share = f"{tiny.activations:,} of {tiny.of_activations:,}"
            found.append(f"{share} FP32 activations on golden inputs are denormal; {_FLUSH}")
        if self.saturation is not None and self.saturation.at_risk:
            at_risk = f"{self.saturation.at_risk:,} of {self.saturation.pairs:,} pairs of weights"
            measured, seen = self.saturation.sums, ""
            if measured is not None:
                seen = f"; on golden inputs {self.saturation.saturated or 0:,} of {measured:,} sums are"
            found.append(f"{at_risk} can go beyond 16 bits on x86 processors with AVX2 and without VNNI{seen}")
        if self.other_operators:
            listed = ", ".join(f"{name} ({count})" for name, count in self.other_operators.items())
            found.append(f"operators that are not of the ONNX standard, which other runtimes lack: {listed}")
        if self.control_flow:
            listed = ", ".join(f"{name} ({count})" for name, count in self.control_flow.items())
            found.append(f"control flow, in which runtimes differ: {listed}")
        return found

    def notes_here(self, onnxruntime: str, flags: frozenset[str] | None) -> list[str]:
        """What matters on this machine.

        Args:
            onnxruntime: its version.
            flags: what the processor can do, as Linux names it; None: not known.
        """
        found = []
        if self.needs is not None and release(onnxruntime) < release(self.needs):
            found.append(
                f"needs ONNX Runtime {self.needs} (opset {self.opset}, IR {self.ir_version}"
                f"{', operators of its own' if self.other_operators else ''}), here {onnxruntime}"
            )
        if self.saturation is not None and self.saturation.at_risk:
            if flags is None:
                found.append("INT8 sums can be cut off at 16 bits here: whether the processor has VNNI is not known")
            elif "avx2" in flags and not flags & {"avx_vnni", "avx512_vnni"}:
                found.append("INT8 sums can be cut off at 16 bits here: the processor has AVX2 and no VNNI")
        return found


_FLUSH = "where that is slow, set ONNX Runtime's session.set_denormal_as_zero to 1"


def release(version: str) -> tuple[int, ...]:
    """``"1.18.0"`` → (1, 18): what versions are compared by."""
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
