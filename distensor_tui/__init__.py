"""The dashboard and the command line of providers. Knows the supervisor only by its local socket."""

from __future__ import annotations

__version__ = "0.1.0"
