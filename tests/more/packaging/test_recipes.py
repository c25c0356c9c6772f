"""The recipes in packaging/, each built or loaded by its own tool.

PyTorch, and in EasyBuild the toolchain, are stubs: module files, or empty packages.
Their Python sees the packages of this environment, all but torchrun_hpc.
"""

from __future__ import annotations

import platform
import re
import shlex
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.cluster.commands import ENVIRON, require
from tests.support.patience import PATIENCE
from torchrun_hpc import __version__

HERE = Path(__file__).parent
RECIPES = ROOT / "packaging"
TOOLS = ROOT / ".packaging"
LMOD = Path("/usr/share/lmod/lmod")
ROOT_ALLOWED = "--allow-use-as-root-and-accept-consequences"
TWO_MEET = (
    'import torch.distributed as d; d.init_process_group("gloo"); '
    "d.barrier(); assert d.get_world_size() == 2"
)

pytestmark = pytest.mark.xdist_group("package")


def run(command, **more):
    return subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=PATIENCE * 4,
        **({"env": ENVIRON | {"HOME": "/nonexistent"}} | more),
    )


def in_shell(text, **environ):
    """Run lines of bash, with the command `module`; the first that fails ends them."""
    lines = f". {LMOD}/init/bash\nset -e\n{text}"
    return run(["bash", "-c", lines], env=ENVIRON | environ, cwd="/")


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    """Make a folder with all packages of this environment, but torchrun_hpc."""
    folder = tmp_path_factory.mktemp("libraries")
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if "torchrun_hpc" not in path.name and path.suffix != ".pth":
            (folder / path.name).symlink_to(path)
    return folder


@pytest.fixture(scope="module")
def python(libraries, tmp_path_factory):
    """Make what module files name: an environment with these packages."""
    folder = tmp_path_factory.mktemp("python")
    venv.create(folder, symlinks=True)
    [packages] = folder.glob("lib/python3*/site-packages")
    (packages / "libraries.pth").write_text(f"{libraries}\n", encoding="utf-8")
    for name in ("cuobjdump", "flexiblas"):  # EasyBuild asks them
        program = folder / "bin" / name
        program.write_text("#!/bin/sh\n", encoding="utf-8")
        program.chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def pytorch(python, tmp_path_factory):
    """Make a folder with a module file of PyTorch."""
    folder = tmp_path_factory.mktemp("modules")
    text = f'prepend_path("PATH", "{python}/bin")\n'
    (folder / "PyTorch").mkdir()
    (folder / "PyTorch" / "2.lua").write_text(text, encoding="utf-8")
    return folder


def need(path):
    reason = f"{path} is absent (tests/more/packaging/install.sh)"
    require(None if path.exists() else reason)


# All modules that EasyBuild loads to build it.
MODULES = """
    GCC/13.3.0 OpenMPI/5.0.3-GCC-13.3.0 FlexiBLAS/3.4.4-GCC-13.3.0
    FFTW/3.3.10-GCC-13.3.0 FFTW.MPI/3.3.10-gompi-2024a
    ScaLAPACK/2.2.0-gompi-2024a-fb foss/2024a CUDA/12.6.0
    Python/{python}-foss-2024a Python/{python}-GCCcore-13.3.0
    Python-bundle-PyPI/2024.06-GCCcore-13.3.0
    hatchling/1.27.0-GCCcore-13.3.0 PyTorch/2.9.1-foss-2024a-CUDA-12.6.0
"""


def write_modules(folder, python):
    names = MODULES.format(python=platform.python_version()).split()
    for name in names:
        software, version = name.split("/")
        variable = software.upper().replace(".", "").replace("-", "MIN")
        lines = [
            f'setenv("EBROOT{variable}", "{python}")',
            f'setenv("EBVERSION{variable}", "{version.split("-")[0]}")',
        ]
        if software == "foss":
            lines += [f'depends_on("{x}")' for x in names[: names.index(name)]]
        if software == "Python":
            lines.append(f'prepend_path("PATH", "{python}/bin")')
        path = folder / f"{name}.lua"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines), encoding="utf-8")


def test_easybuild_builds_it_and_its_module_works(built, python, tmp_path):
    eb = TOOLS / "easybuild" / "bin" / "eb"
    need(LMOD)
    need(eb)
    write_modules(tmp_path / "stubs", python)
    # Everything as it is, but the version of Python: that of this machine.
    [recipe] = RECIPES.glob("easybuild/*.eb")
    text = recipe.read_text(encoding="utf-8")
    easyconfig = tmp_path / recipe.name
    ours = f"('Python', '{platform.python_version()}')"
    text, count = re.subn(r"\('Python', '[\d.]+'\)", ours, text)
    assert count == 1
    easyconfig.write_text(text, encoding="utf-8")
    options = shlex.join(
        [ROOT_ALLOWED, f"--sourcepath={built}", f"--prefix={tmp_path}"]
    )
    done = in_shell(
        f"module use {tmp_path}/stubs\n"
        f"{eb} {easyconfig} {options} --inject-checksums\n"
        f"{eb} {easyconfig} {options}\n"
        f"module use {tmp_path}/modules/all\n"
        "module load torchrun_hpc\n"
        "command -v torchrun_hpc\n",
        EB_PYTHON=str(eb.parent / "python"),
        HOME=str(tmp_path),
    )
    assert done.returncode == 0, done.stdout
    assert "checksums = ['" in easyconfig.read_text(encoding="utf-8")
    checked = re.findall(r"result for command '(.*)': OK", done.stdout)
    programs = [line.partition(" --")[0] for line in checked]
    assert programs == ["torchrun_hpc", *["python -m torchrun_hpc"] * 2]
    found = done.stdout.splitlines()[-1]
    assert found.startswith(f"{tmp_path}/software/torchrun_hpc/{__version__}-")


def test_rattler_builds_it_and_its_tests_pass(built, libraries, tmp_path):
    rattler = TOOLS / "py-rattler-build" / "bin" / "python"
    need(rattler)
    recipe = tmp_path / "packaging" / "conda" / "recipe.yaml"
    recipe.parent.mkdir(parents=True)
    text = (RECIPES / "conda" / "recipe.yaml").read_text(encoding="utf-8")
    recipe.write_text(text, encoding="utf-8")
    (tmp_path / "dist").symlink_to(built)
    done = run([rattler, HERE / "rattler.py", recipe, tmp_path / "output", libraries])
    assert done.returncode == 0, done.stdout
    verdicts = re.findall("^(passed|FAILED)$", done.stdout, re.MULTILINE)
    assert verdicts == ["passed", "passed"], done.stdout
    assert "2 workers on this machine" in done.stdout


def test_the_oldest_hatchling_builds_the_wheel(built, tmp_path):
    python = TOOLS / "hatchling" / "bin" / "python"
    need(python)
    [sdist] = built.glob("*.tar.gz")
    command = ("-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index")
    done = run([python, *command, f"--wheel-dir={tmp_path}", sdist])
    assert done.returncode == 0, done.stdout
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {path.name for path in built.glob("*.whl")}


def test_lmod_loads_its_module(built, python, pytorch, tmp_path):
    need(LMOD)
    root = tmp_path / "torchrun_hpc" / __version__
    [wheel] = built.glob("*.whl")
    pip = (python / "bin" / "python", "-m", "pip", "install", "--quiet", "--no-deps")
    done = run([*pip, f"--target={root}", wheel])
    assert done.returncode == 0, done.stdout
    # As the administrator does it: the folder, and the site.
    module = tmp_path / "modules" / "torchrun_hpc" / f"{__version__}.lua"
    module.parent.mkdir(parents=True)
    text = (RECIPES / "lmod" / "torchrun_hpc" / module.name).read_text(encoding="utf-8")
    for before, after in (
        ('"/opt/torchrun_hpc"', f'"{root.parent}"'),
        ("local site = nil", 'local site = "jsc"'),
    ):
        assert before in text
        text = text.replace(before, after)
    module.write_text(text, encoding="utf-8")
    done = in_shell(
        f"module use {pytorch} {module.parents[1]}\n"
        "module load torchrun_hpc\n"
        "echo site=$PET_HPC_SITE\n"
        "torchrun_hpc --version\n"
        "python -m torchrun_hpc --standalone --nproc_per_node=2 --no-python"
        f" python -c {shlex.quote(TWO_MEET)}\n"
        "module unload torchrun_hpc\n"
        "echo after=$PET_HPC_SITE$PYTHONPATH\n"
        "module list 2>&1\n"
    )
    assert done.returncode == 0, done.stdout
    assert "site=jsc\n" in done.stdout
    assert f"torchrun_hpc {__version__}, " in done.stdout
    assert "2 workers on this machine" in done.stdout
    assert "after=\n" in done.stdout
    assert "No modules loaded" in done.stdout
