"""What is needed, told in one line where it is missing; `pip install -e .` makes the imports work from every folder."""
import os
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from core.config import UserError, check_installation

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def python(*words, cwd, **variables):
    done = subprocess.run([sys.executable, *words], cwd=cwd, env={**os.environ, **variables}, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("name, version", [("transformers", "4.57.1"), ("transformers", "6.0.0"), ("torch", "2.5.1+cpu"), ("torch", "2.14.0")])
def test_another_version_is_refused_in_one_line(monkeypatch, name, version):
    installed = metadata.version
    monkeypatch.setattr(metadata, "version", lambda package: version if package == name else installed(package))
    with pytest.raises(UserError) as end:
        check_installation()
    assert str(end.value).startswith(f"{name} {version} is installed, and {name}") and "\n" not in str(end.value)
    assert str(end.value).endswith("is needed; pip install -r requirements.txt")


def test_a_missing_package_is_not_this_checks_affair(monkeypatch):
    def version(package):
        raise metadata.PackageNotFoundError(package)
    monkeypatch.setattr(metadata, "version", version)
    check_installation()


def test_an_old_python_is_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 10, 13))
    with pytest.raises(UserError, match="3.11 or later is needed"):
        check_installation()
    assert PYPROJECT["project"]["requires-python"] == ">=3.11"


def test_a_program_ends_in_that_line_and_an_import_does_not(tmp_path):
    """sys.exit in an import would end a notebook. A transformers of a version that nobody has is found before the real one."""
    (tmp_path / "transformers-4.57.1.dist-info").mkdir()
    (tmp_path / "transformers-4.57.1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 4.57.1\n")
    (tmp_path / "toy.py").write_text("from core.config import main\nmain(None, None, None)\n")
    assert python("-c", "import core.config, envs", cwd=ROOT, PYTHONPATH=str(tmp_path)) == (0, "", "")
    code, out, errors = python(str(tmp_path / "toy.py"), cwd=ROOT, PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert (code, out) == (2, "")
    assert errors == "toy.py: transformers 4.57.1 is installed, and transformers<6,>=5.23 is needed; pip install -r requirements.txt\n"


def test_no_import_ends_the_process():
    old_names = {"check.py", "play.py"}  # of two commands in envs/: they say the new one
    for path in [*ROOT.glob("*.py"), *(path for room in ("core", "envs", "extras") for path in (ROOT / room).rglob("*.py"))]:
        lines = path.read_text("utf-8").splitlines()
        if path.parent != ROOT / "envs" or path.name not in old_names:
            assert not [line for line in lines if line.startswith(("sys.exit", "exit(", "quit(", "raise SystemExit", "check_installation()"))], path


@pytest.mark.slow
def test_an_editable_install_makes_the_imports_work_from_another_folder(tmp_path):
    pytest.importorskip("setuptools", "64")
    if pip_is_missing():
        pytest.skip("needs pip")
    target = tmp_path / "site"
    build = python("-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(target), "-e", str(ROOT), cwd=tmp_path)
    assert build[0] == 0, build
    found = "import sys, site; site.addsitedir(sys.argv[1]); import agent, grpo, extras.show.page, envs; print(grpo.__file__, envs.load('meetings').__name__)"
    code, out, errors = python("-c", found, str(target), cwd=tmp_path, PYTHONPATH="")
    assert (code, out) == (0, f"{ROOT / 'grpo.py'} Meetings\n"), errors


def pip_is_missing():
    return python("-m", "pip", "--version", cwd=ROOT)[0] != 0


def test_the_package_lists_every_module_and_folder_and_no_requirement_of_its_own():
    setuptools = PYPROJECT["tool"]["setuptools"]
    assert sorted(setuptools["py-modules"]) == sorted(path.stem for path in ROOT.glob("*.py"))
    folders = {path.parent.relative_to(ROOT) for form in ("*/*.py", "extras/*/*.py") for path in ROOT.glob(form)} - {Path("tests")}
    assert set(setuptools["packages"]) == {".".join(path.parts) for path in folders if not path.name.startswith(".")}
    assert setuptools["dynamic"]["dependencies"] == {"file": "requirements.txt"} and "dependencies" not in PYPROJECT["project"]


def test_uv_installs_what_pip_does():
    """`uv run pytest` installs the group dev, which uv does by itself; `uv run python grpo.py` too."""
    lines = [line.partition("#")[0].strip() for line in (ROOT / "requirements-dev.txt").read_text().splitlines()]
    first, *packages = filter(None, lines)
    assert first == "-r requirements.txt" and PYPROJECT["dependency-groups"] == {"dev": packages}
    # What uv resolves depends on the machine: CUDA's torch on Linux, the CPU's on macOS.
    assert "uv.lock" in (ROOT / ".gitignore").read_text().split()


def test_an_install_that_copies_brings_the_files_that_the_code_reads():
    """`pip install .`, or from a git address: `import grpo` did not find experiment/synonyms.txt."""
    setuptools = PYPROJECT["tool"]["setuptools"]
    files = [path for name in setuptools["packages"] if name != "bench" for path in (ROOT / name.replace(".", "/")).iterdir()]
    files = [path for path in files if path.is_file() and path.suffix != ".py"]
    assert files and all(any(path.match(form) for form in setuptools["package-data"]["*"]) for path in files)


@pytest.mark.parametrize("given, expected", [({}, "2000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "PASSIVE"}, "None")])
def test_how_long_torchs_threads_spin_is_set_before_torch_unless_the_user_did(given, expected):
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    code = """
import os, sys
class AtTorch:
    def find_spec(name, *_):
        if name == "torch":
            sys.exit(os.environ.get("GOMP_SPINCOUNT", "None"))
sys.meta_path.insert(0, AtTorch)
import grpo"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env={**kept, **given}, capture_output=True, text=True)
    assert done.stderr.strip() == expected
