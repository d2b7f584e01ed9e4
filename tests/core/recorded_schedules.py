"""What the recorded cases call the schedules."""

from __future__ import annotations

from distensor.core.schedules import Schedule

NAMES = {
    "GPipe": Schedule.GPIPE,
    "1F1B": Schedule.ONE_F_ONE_B,
    "Interleaved1F1B": Schedule.INTERLEAVED,
    "InterleavedZeroBubble": Schedule.ZERO_BUBBLE,
    "ZBVZeroBubble": Schedule.ZBV,
    "LoopedBFS": Schedule.LOOPED_BFS,
}
