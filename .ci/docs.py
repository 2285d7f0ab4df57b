"""Build the manual with Zensical, and fail on a broken link, anchor or API name.

    python -m pip install -e ".[docs]"
    python .ci/docs.py build --site-dir site
    python .ci/docs.py serve

In a clone, relative links lead from a page to any file of the repository. The site has only the
files of `docs`, so this script builds a copy in which

- links to other files have the address of the repository (`GITHUB_REPOSITORY`), or are plain text
  if that is unknown,
- the pictures of `examples` are next to the pages.
"""

import argparse
import os
import posixpath
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PICTURES = "examples/images"
LINK = re.compile(r"(!?)\[((?:[^][]|\[[^]]*\])*)\]\(((?:\.\./)+[^)\s]*)\)")


def repository_url() -> str:
    """Return the address of the repository, or an empty string if the build does not know it."""
    host = os.environ.get("GITHUB_SERVER_URL", "https://github.com")
    repository = os.environ.get("GITHUB_REPOSITORY")
    return f"{host}/{repository}" if repository else ""


def rewrite_links(text: str, page: str, repository: str) -> str:
    """Return the text of a page with new links for files outside `docs`.

    Args:
        text: Markdown of the page.
        page: Path of the page in the repository, such as "docs/how-to/outputs.md".
        repository: Address of the repository, or an empty string.
    """
    folder = posixpath.dirname(page)
    ref = os.environ.get("GITHUB_REF_NAME", "main")

    def rewrite(found: re.Match[str]) -> str:
        image, label, link = found.groups()
        target = posixpath.normpath(f"{folder}/{link}")
        if target.startswith("docs/"):
            return found[0]
        if target.startswith(f"{PICTURES}/"):
            place = posixpath.relpath(f"docs/images/{posixpath.basename(target)}", folder)
            return f"{image}[{label}]({place})"
        return f"{image}[{label}]({repository}/blob/{ref}/{target})" if repository else label

    return LINK.sub(rewrite, text)


def prepare(target: Path) -> None:
    """Copy the configuration, the pages, the pictures and the package to a folder."""
    repository = repository_url()
    config = (ROOT / "zensical.toml").read_text()
    if repository:
        config = config.replace("[project]\n", f'[project]\nrepo_url = "{repository}"\n')
    (target / "zensical.toml").write_text(config)
    shutil.copytree(ROOT / "docs", target / "docs", ignore=shutil.ignore_patterns("*.py"))
    shutil.copytree(ROOT / PICTURES, target / "docs/images")
    for path in (target / "docs").rglob("*.md"):
        page = path.relative_to(target).as_posix()
        path.write_text(rewrite_links(path.read_text(), page, repository))
    package = shutil.copytree(ROOT / "lightning_gputime", target / "lightning_gputime")
    for folder in package.iterdir():
        if folder.is_dir():
            (folder / "__init__.py").touch()  # Griffe reads no folder without one.


def main() -> int:
    """Build or serve the manual. Return the exit code of Zensical."""
    parser = argparse.ArgumentParser(description="Build or serve the manual.")
    parser.add_argument("command", choices=["build", "serve"])
    parser.add_argument("--site-dir", default="site", help="folder for the built site")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        command = [sys.executable, "-m", "zensical", args.command]
        if args.command == "build":
            command.append("--strict")
        code = subprocess.run(command, cwd=folder).returncode
        if args.command == "build" and not code:
            shutil.copytree(Path(folder, "site"), args.site_dir, dirs_exist_ok=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
