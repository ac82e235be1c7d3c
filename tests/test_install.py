"""The wheel holds all that the package needs: it works from any folder, with nothing of the checkout in reach."""

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = sorted(path.stem for path in (ROOT / "profiles").glob("*.json"))


def run(command: list[str], **variables: str) -> None:
    """A command that is to succeed."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=os.environ | variables)
    assert done.returncode == 0, done.stderr


def copy_of_sources(target: Path) -> Path:
    """What a wheel is built from, copied to target: building writes into its sources."""
    for name in ("tpplan", "profiles"):
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, target)
    return target


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the content of the wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    source = copy_of_sources(folder / "source")
    build = ("-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, source)
    run([sys.executable, *map(str, build)])
    (wheel,) = folder.glob("tpplan-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def test_wheel_holds_the_data_files(installed: Path) -> None:
    assert sorted(path.stem for path in (installed / "tpplan" / "profiles").glob("*.json")) == SHIPPED
    assert (installed / "tpplan" / "plan" / "plan.schema.json").is_file()
    assert (installed / "tpplan" / "py.typed").is_file()


def test_wheel_names_its_licence_in_a_form_that_old_setuptools_writes(installed: Path) -> None:
    (metadata,) = installed.glob("tpplan-*.dist-info/METADATA")
    assert "Classifier: License :: OSI Approved :: Apache Software License" in metadata.read_text("utf-8").splitlines()


def test_the_oldest_setuptools_that_is_asked_for_reads_the_project() -> None:
    """Setuptools 77 is the first that takes an expression as `license`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["build-system"]["requires"] == ["setuptools>=65"]
    assert "license" not in project["project"]


@pytest.mark.long
@pytest.mark.parametrize("release", ["==65.5.0", "==77.0.3", ""])
@pytest.mark.parametrize("isolated", [True, False])
def test_wheel_is_built_by_old_and_new_setuptools(tmp_path: Path, release: str, isolated: bool) -> None:
    """Installs setuptools from the registry: oldest that is asked for, first with licence expressions, newest."""
    source = copy_of_sources(tmp_path / "source")
    python = str(tmp_path / "environment" / "bin" / "python")
    run([sys.executable, "-m", "venv", str(tmp_path / "environment")])
    run([python, "-m", "pip", "install", "--quiet", "--upgrade", f"setuptools{release}", "wheel"])
    constraints = tmp_path / "constraints.txt"
    constraints.write_text(f"setuptools{release}\n" if release else "", encoding="utf-8")
    build = [python, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(source)]
    run(build + ["--no-build-isolation"] * (not isolated), PIP_CONSTRAINT=str(constraints))
    assert len(list(tmp_path.glob("tpplan-*.whl"))) == 1


def test_wheel_holds_every_module(installed: Path) -> None:
    modules = {path.relative_to(ROOT / "tpplan") for path in (ROOT / "tpplan").rglob("*.py")}
    assert modules <= {path.relative_to(installed / "tpplan") for path in (installed / "tpplan").rglob("*.py")}


def test_installed_package_finds_profiles_from_any_folder(installed: Path, tmp_path: Path) -> None:
    code = (
        "import tpplan\n"
        "from tpplan.machine.profile import shipped_profiles\n"
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
    assert done.stdout.split() == [str(installed / "tpplan" / "__init__.py"), *SHIPPED]
