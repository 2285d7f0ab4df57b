"""The built wheel: its files, metadata, and use from another folder."""

import os
import subprocess
import sys
import venv
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest

import lightning_gputime

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("build")
    folder = tmp_path_factory.mktemp("dist")
    where = {"GITHUB_REPOSITORY": "someone/timer", "GITHUB_REF_NAME": "v1.2.3"}
    # Like for a release, the wheel is built from the source archive.
    command = [sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, env={**os.environ, **where}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    [path] = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        [name] = [word for word in archive.namelist() if word.endswith("dist-info/METADATA")]
        return message_from_bytes(archive.read(name))


def test_wheel_has_all_modules_and_py_typed(wheel: Path) -> None:
    source = ROOT / "lightning_gputime"
    modules = {str(path.relative_to(ROOT)) for path in source.rglob("*.py")}
    with zipfile.ZipFile(wheel) as archive:
        assert modules | {"lightning_gputime/py.typed"} <= set(archive.namelist())


def test_release_metadata_has_absolute_links(metadata: Message) -> None:
    urls = dict(item.split(", ") for item in metadata.get_all("Project-URL", []))
    assert urls["Source"] == "https://github.com/someone/timer"
    text = str(metadata.get_payload())
    assert "](https://github.com/someone/timer/raw/v1.2.3/examples/images/hero.png)" in text
    assert "](https://github.com/someone/timer/blob/v1.2.3/CHANGELOG.md)" in text
    assert "https://github.com/someone/timer/actions/workflows/test.yml/badge.svg" in text
    links = [name.split(")")[0] for name in text.split("](")[1:]]
    assert not [entry for entry in links if not entry.startswith(("https://", "#"))]


def test_wheel_works_from_another_folder(wheel: Path, tmp_path: Path) -> None:
    home = tmp_path / "env"
    venv.create(home)
    python = home / ("Scripts" if os.name == "nt" else "bin") / "python"
    run = {"cwd": tmp_path, "capture_output": True, "text": True}
    pip = [sys.executable, "-m", "pip", "--python", python]
    install = [*pip, "install", "--quiet", "--no-index", "--no-deps", wheel]
    done = subprocess.run(install, **run)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stderr
    # The new environment finds the packages of this one through a path file. It does not find the
    # editable clone, because Python does not follow path files in those folders.
    [packages] = home.glob("lib/*/site-packages")
    folders = [path for path in sys.path if path.endswith("-packages")]
    (packages / "rest.pth").write_text("\n".join(folders))
    script = tmp_path / "quickstart.py"
    script.write_text((ROOT / "examples" / "quickstart.py").read_text())
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    clean["OMP_NUM_THREADS"] = "1"
    code = "import lightning_gputime; print(lightning_gputime.__file__)"
    place = subprocess.run([python, "-c", code], env=clean, **run)  # type: ignore[call-overload]
    assert Path(place.stdout.strip()).is_relative_to(packages)
    done = subprocess.run([python, script], env=clean, **run)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stderr
    assert "forward" in done.stdout
    done = subprocess.run([python.parent / "lightning-gputime", "--version"], env=clean, **run)  # type: ignore[call-overload]
    assert done.stdout.split()[-1] == lightning_gputime.__version__
