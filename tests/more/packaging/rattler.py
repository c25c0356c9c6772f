"""Build the recipe, and run its tests: rattler.py RECIPE OUTPUT LIBRARIES.

No channel can be reached. Empty packages stand for what the recipe needs, and that of
Python is a virtual environment that sees the folder LIBRARIES.
"""

import platform
import sys
from pathlib import Path
from typing import Any

from rattler_build import Package, Stage0Recipe

interpreter: Any = sys
recipe, output, libraries = map(Path, sys.argv[1:])
names = ("pip", "hatchling", "pytorch", "psutil", "packaging", "tomli")
site_packages = "$PREFIX/lib/python{}.{}/site-packages".format(*sys.version_info)
python = (
    f"{interpreter._base_executable} -m venv --without-pip $PREFIX"
    f" && echo {libraries} > {site_packages}/libraries.pth"
)
stubs = {"python": (platform.python_version(), python)}
stubs |= dict.fromkeys(names, ("99", ":"))
for name, (version, script) in stubs.items():
    stub = {
        "package": {"name": name, "version": version},
        "build": {"script": script},
    }
    Stage0Recipe.from_dict(stub, recipe_dir=output / name).run_build(
        output_dir=output, channels=[]
    )

channels = [output.as_uri()]
[built] = Stage0Recipe.from_file(recipe).run_build(output_dir=output, channels=channels)
results = Package.from_file(built.packages[0]).run_tests(channel=channels)
for result in results:
    print(*result.output, sep="\n")
    print("passed" if result.success else "FAILED")
