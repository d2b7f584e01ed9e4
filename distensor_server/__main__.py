"""`python -m distensor_server` is `distensor-server`."""

from __future__ import annotations

from distensor_server.cli import main

raise SystemExit(main())
