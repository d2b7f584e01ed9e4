"""Put the package that lies two levels up, and the license, into the wheel and the sdist.

Does nothing for editable builds (`dev-mode-dirs` covers them) or when the package lies beside this file, as
it does when the wheel is built from its own sdist. The same file serves both distributions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class IncludePackage(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        name = self.metadata.name.replace("-", "_")
        here = Path(self.root)
        if version == "editable" or (here / name).is_dir():
            return
        repository = here.parent.parent
        files = [path for path in sorted((repository / name).rglob("*")) if path.is_file()]
        if self.target_name == "sdist":
            files.append(repository / "LICENSE")
        build_data["force_include"].update(
            {str(path): str(path.relative_to(repository)) for path in files if "__pycache__" not in path.parts}
        )
