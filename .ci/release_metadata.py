"""Completes a release's metadata: the address of the repository, and a README that links to it.

The workflow that builds a release says where it runs. A build anywhere else has no address, and its
README is the one in the clone.
"""

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_IMAGE = re.compile(r"(!\[[^]]*\]\()(?!https?://|#)")
_LINK = re.compile(r"(?<!!)(\[[^]]*\]\()(?!https?://|#)")


class ReleaseMetadata(MetadataHookInterface):
    """Set `readme` and `urls`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Complete the metadata in place."""
        text = Path(self.root, "README.md").read_text()
        if repository := os.environ.get("GITHUB_REPOSITORY"):
            ref = os.environ.get("GITHUB_REF_NAME", "main")
            host = os.environ.get("GITHUB_SERVER_URL", "https://github.com")
            page = f"{host}/{repository}"
            text = _IMAGE.sub(rf"\1{page}/raw/{ref}/", text)
            text = _LINK.sub(rf"\1{page}/blob/{ref}/", text)
            metadata["urls"] = {
                "Source": page,
                "Documentation": f"{page}/blob/{ref}/docs/index.md",
                "Changelog": f"{page}/blob/{ref}/CHANGELOG.md",
                "Issues": f"{page}/issues",
            }
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
