"""What grpc reads from the environment when it is loaded; imported before it."""

from __future__ import annotations

import os

# Every failure of a call reaches our callers as an error with its reason; grpc's own lines on stderr would only tear
# a dashboard or a progress bar apart.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
