"""The versions of the tables, oldest first. A change is a new file and a new line here, never an edit of an old one."""

from __future__ import annotations

from distensor.hub.stores.migrations.ddl import Version
from distensor.hub.stores.migrations.versions import (
    v0001_books,
    v0002_hours,
    v0003_epochs,
    v0004_access,
    v0005_ledger,
    v0006_objections,
)

VERSIONS: tuple[Version, ...] = tuple(
    Version(revision=module.revision, before=module.down_revision, up=module.UP, down=module.DOWN)
    for module in (v0001_books, v0002_hours, v0003_epochs, v0004_access, v0005_ledger, v0006_objections)
)
