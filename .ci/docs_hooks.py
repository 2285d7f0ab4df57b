"""Links from the manual to files outside of `docs`, which the site does not have.

In a clone, and where it is hosted, relative links lead to them. On the site they get the address of
the repository. A build that knows none shows their text alone.
"""

import os
import posixpath
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files

_LINK = re.compile(r"(!?)\[((?:[^][]|\[[^]]*\])*)\]\(((?:\.\./)+[^)\s]*)\)")
_PICTURES = "examples/images"
_FOLDER = tempfile.TemporaryDirectory()
_COPY = Path(_FOLDER.name)


@event_priority(100)  # Before the plugin that documents the API looks for the package.
def on_config(config: Any) -> Any:
    """Set the address of the repository, if the build knows it, and prepare the package."""
    # Griffe reads no folder without an `__init__.py`, which Python does.
    package = Path(config.config_file_path).parent / "lightning_gputime"
    shutil.rmtree(_COPY / package.name, ignore_errors=True)
    copy = shutil.copytree(package, _COPY / package.name)
    for folder in copy.iterdir():
        if folder.is_dir():
            (folder / "__init__.py").touch()
    config.plugins["mkdocstrings"].config.handlers["python"]["paths"] = [str(_COPY)]
    if repository := os.environ.get("GITHUB_REPOSITORY"):
        host = os.environ.get("GITHUB_SERVER_URL", "https://github.com")
        config.repo_url = f"{host}/{repository}"
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pictures of the examples."""
    for picture in sorted(Path(config.config_file_path).parent.glob(f"{_PICTURES}/*")):
        name = f"images/{picture.name}"
        files.append(File.generated(config, name, abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Rewrite the links that leave `docs`."""
    folder = posixpath.dirname(f"docs/{page.file.src_uri}")
    ref = os.environ.get("GITHUB_REF_NAME", "main")

    def rewrite(found: re.Match[str]) -> str:
        image, text, link = found.groups()
        target = posixpath.normpath(f"{folder}/{link}")
        if target.startswith("docs/"):
            return found[0]
        if target.startswith(f"{_PICTURES}/"):
            place = posixpath.relpath(f"docs/images/{posixpath.basename(target)}", folder)
            return f"{image}[{text}]({place})"
        if not config.repo_url:
            return text
        return f"{image}[{text}]({config.repo_url}/blob/{ref}/{target})"

    return _LINK.sub(rewrite, markdown)
