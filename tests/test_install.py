"""The wheel holds all that the package needs: it works from any folder, with nothing of the checkout in reach."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = sorted(path.name for path in (ROOT / "profiles").glob("*.json"))


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the content of the wheel, built from a copy: building writes into its sources."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for name in ("tpplan", "profiles"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, source)
    build = ("-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, source)
    done = subprocess.run([sys.executable, *map(str, build)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("tpplan-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def test_wheel_holds_the_data_files(installed: Path) -> None:
    assert sorted(path.name for path in (installed / "tpplan" / "profiles").glob("*.json")) == SHIPPED
    assert (installed / "tpplan" / "plan.schema.json").is_file()
    assert (installed / "tpplan" / "py.typed").is_file()


def test_wheel_holds_every_module(installed: Path) -> None:
    modules = {path.relative_to(ROOT / "tpplan") for path in (ROOT / "tpplan").rglob("*.py")}
    assert modules <= {path.relative_to(installed / "tpplan") for path in (installed / "tpplan").rglob("*.py")}


def test_installed_package_finds_profiles_from_any_folder(installed: Path, tmp_path: Path) -> None:
    code = (
        "import tpplan\n"
        "from tpplan.profile import shipped_profiles\n"
        "print(tpplan.__file__, *(tpplan.load_profile(name).name for name in shipped_profiles()))\n"
    )
    environment = os.environ | {"PYTHONPATH": str(installed)}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(installed / "tpplan" / "__init__.py"), *(Path(name).stem for name in SHIPPED)]
