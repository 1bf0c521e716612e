"""A wheel, unpacked elsewhere, finds its recipes and templates."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_a_wheel_carries_the_recipes_and_finds_them(tmp_path):
    source, site = tmp_path / "source", tmp_path / "site"
    never = shutil.ignore_patterns(".*", "*.egg-info", "build", "__pycache__")
    # by people who tried something in their checkout; hvdtrain/ has rooms of these names
    made = {
        "runs",
        "data",
    }
    shutil.copytree(
        ROOT,
        source,
        ignore=lambda at, names: never(at, names) | (made if at == str(ROOT) else set()),
    )
    build = f"from setuptools import build_meta; print(build_meta.build_wheel({str(tmp_path)!r}))"
    subprocess.run(
        [sys.executable, "-c", build], cwd=source, check=True, capture_output=True, timeout=100
    )
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
        names = archive.namelist()
    assert {"hvdtrain/reporting/page.css", "hvdtrain/planning/cases/mxnet-alexnet.toml"} <= {*names}
    assert not [name for name in names if name.startswith(("datasets/", "launchers/", "tests/"))]
    look = (
        "from hvdtrain.base.config import recipes;"
        "print(recipes.__file__, *map(recipes.names, ('datasets', 'launchers', 'presets')));"
        "recipes.load('launchers', 'local'); recipes.load('presets', 'cnn-mnist')"
    )
    env = os.environ | {"PYTHONPATH": str(site)}
    words = [sys.executable, "-c", look]
    found = subprocess.run(
        words, cwd=tmp_path, env=env, check=True, capture_output=True, text=True, timeout=60
    )
    assert found.stdout.startswith(str(site))
    assert "'digits'" in found.stdout and "'turntable'" in found.stdout
    assert "'local'" in found.stdout
    assert "'cnn-mnist'" in found.stdout
