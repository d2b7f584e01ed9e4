"""StageProgram: the data of a stage with its canonical bytes and the full check of foreign ones."""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass

from distensor.program.encoding import decode, encode
from distensor.program.values import DEFAULT_LIMITS, Limits, ProgramData


@dataclass(frozen=True, kw_only=True, slots=True)
class StageProgram(ProgramData):
    """What a worker runs for one stage."""

    def to_json(self) -> bytes:
        """Canonical bytes: the same program always gives the same bytes."""
        return encode(self)

    def digest(self) -> str:
        """sha256 of the canonical bytes, in hex."""
        return hashlib.sha256(self.to_json()).hexdigest()

    @staticmethod
    def from_json(data: bytes, limits: Limits = DEFAULT_LIMITS) -> StageProgram:
        """Decode foreign bytes and check everything, including shapes and bytes on the meta device.

        Raises:
            ProgramRejectedError: anything that is not a program this version may run within `limits`.
        """
        from distensor.program.shapes import check_shapes  # torch is loaded only where programs are checked

        program = StageProgram.of(decode(data, limits))
        check_shapes(program, limits)
        return program

    @staticmethod
    def of(data: ProgramData) -> StageProgram:
        fields = {field.name: getattr(data, field.name) for field in dataclasses.fields(data)}
        return StageProgram(**fields)
