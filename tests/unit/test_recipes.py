"""The recipes in packaging/: version and dependencies."""

from __future__ import annotations

import re
from importlib.metadata import requires

from tests.support import ROOT
from torchrun_hpc import __version__

RECIPES = ROOT / "packaging"


def test_each_recipe_is_of_this_version():
    [easyconfig] = RECIPES.glob("easybuild/*.eb")
    [module] = RECIPES.glob("lmod/torchrun_hpc/*.lua")
    assert easyconfig.name.startswith(f"torchrun_hpc-{__version__}-")
    assert f"version = '{__version__}'" in easyconfig.read_text(encoding="utf-8")
    assert module.stem == __version__
    assert f"torchrun_hpc-{__version__}-py3" in module.read_text(encoding="utf-8")
    for path, line in (
        ("conda/recipe.yaml", f'version: "{__version__}"'),
        ("spack/package.py", f'version("{__version__}")'),
        ("spack/package.py", f"torchrun_hpc-{__version__}.tar.gz"),
    ):
        assert line in (RECIPES / path).read_text(encoding="utf-8")


def test_each_recipe_has_all_dependencies():
    lines = requires("torchrun_hpc") or []
    names = {re.split(r"[^\w-]", x)[0] for x in lines if "extra ==" not in x}
    spack = (RECIPES / "spack" / "package.py").read_text(encoding="utf-8")
    needed = set(re.findall(r'depends_on\("py-([\w-]+)', spack)) - {"hatchling"}
    assert needed == names
    conda = (RECIPES / "conda" / "recipe.yaml").read_text(encoding="utf-8")
    [block] = re.findall(r"^  run:\n((?:    - .*\n)+)", conda, re.MULTILINE)
    needed = set(re.findall(r"- ([\w-]+)", block)) - {"python"}
    assert needed == {name.replace("torch", "pytorch") for name in names}


def test_the_package_of_spack_is_python():
    path = RECIPES / "spack" / "package.py"
    compile(path.read_text(encoding="utf-8"), path, "exec")
