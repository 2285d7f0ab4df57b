"""Complete the metadata of a release: addresses of the repository, and a README with badges.

The workflow that builds a release knows its repository. Any other build has no addresses, and its
README is the file in the clone.
"""

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_IMAGE = re.compile(r"(!\[[^]]*\]\()(?!https?://|#)")
_LINK = re.compile(r"(?<!!)(\[[^]]*\]\()(?!https?://|#)")
_TITLE = re.compile(r"\A# .*\n")


def badges(page: str, project: str) -> str:
    """Return the badges of a release, for the top of its README.

    Args:
        page: Address of the repository.
        project: Name on PyPI.
    """
    tests = f"{page}/actions/workflows/test.yml"
    return (
        f"[![tests]({tests}/badge.svg)]({tests})\n"
        f"[![PyPI](https://img.shields.io/pypi/v/{project})](https://pypi.org/project/{project}/)\n"
    )


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
            text = _TITLE.sub(lambda title: f"{title[0]}\n{badges(page, metadata['name'])}", text)
            metadata["urls"] = {
                "Source": page,
                "Documentation": f"{page}/blob/{ref}/docs/index.md",
                "Changelog": f"{page}/blob/{ref}/CHANGELOG.md",
                "Issues": f"{page}/issues",
            }
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
