import os

from spack_repo.builtin.build_systems.python import PythonPackage

from spack.package import *


class PyTorchrunHpc(PythonPackage):
    """torchrun for clusters: one command per job, everything else from the scheduler."""

    # No release can be downloaded yet. Run `python -m build --sdist` in a clone.
    # Run Spack in its folder dist: spack install --no-checksum py-torchrun-hpc
    manual_download = True
    url = f"file://{os.getcwd()}/torchrun_hpc-0.3.0.dev0.tar.gz"

    license("BSD-3-Clause")

    version("0.3.0.dev0")

    depends_on("py-hatchling@1.18:", type="build")

    with default_args(type=("build", "run")):
        depends_on("python@3.10:")
        depends_on("py-torch@2:+distributed")
        depends_on("py-psutil")
        depends_on("py-packaging")
        depends_on("py-tomli", when="^python@:3.10")

    def test_version(self):
        """the command starts"""
        python("-m", "torchrun_hpc", "--version")

    def test_launch(self):
        """two workers run"""
        options = ("--standalone", "--nproc_per_node=2", "--no-python")
        show = ("sh", "-c", "echo worker $RANK of $WORLD_SIZE")
        out = python("-m", "torchrun_hpc", *options, *show, output=str.split)
        check_outputs(["worker 0 of 2", "worker 1 of 2"], out)
