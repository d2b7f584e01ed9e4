"""Put the package that lies two levels up into the wheel and the sdist.

Does nothing for editable builds (`dev-mode-dirs` covers them) or when the package lies beside this file, as it does
when the wheel is built from its own sdist.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGE = "distensor_server"


class IncludePackage(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        here = Path(self.root)
        if version == "editable" or (here / PACKAGE).is_dir():
            return
        package = here.parent.parent / PACKAGE
        build_data["force_include"].update(
            {
                str(path): str(path.relative_to(package.parent))
                for path in sorted(package.rglob("*"))
                if path.is_file() and "__pycache__" not in path.parts
            }
        )
