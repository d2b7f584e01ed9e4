"""Machines behind home internet connections, emulated on this one.

`HomeNet` gives each named host a network namespace of its own and an access line with a rate each way, a delay, loss
and a queue. Where namespaces are not permitted `DelayLine` carries single TCP connections as such lines would.
"""

from distensor.testing.homenet.delay_line import DelayLine
from distensor.testing.homenet.net import Counters, HomeNet, Permission, permitted
from distensor.testing.homenet.profiles import DATACENTRE, HOME, LAN, Profile

__all__ = ["DATACENTRE", "HOME", "LAN", "Counters", "DelayLine", "HomeNet", "Permission", "Profile", "permitted"]
